"""A warning about weights that are too coarse for their updates."""

from collections.abc import Mapping

from jaxrl.core import Precision, short_name
from jaxrl.diagnostics import History

_METRIC, _MANY = "update/absorbed", 0.5


def absorbed_note(
    metrics: Mapping[str, float], history: History, *, precision: Precision
) -> str | None:
    """Returns a line if rounding takes away most updates of the first step that measures it, else
    None. `history` has the steps before it."""
    share = metrics.get(_METRIC, 0.0)
    if share < _MANY or _METRIC in history.names:
        return None
    return (
        f"rounding the weights to params={short_name(precision.params)} takes away {share:.1%} of "
        "their updates: most weights stay as they are; use precision = 'bf16_master' or "
        "params=f32, or a higher optimizer.learning_rate"
    )
