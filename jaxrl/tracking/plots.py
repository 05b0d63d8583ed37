"""The plot of a run: its main curves in one PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Title and metric of each panel.
PANELS = (
    ("reward", "reward"),
    ("held-out accuracy", "eval/accuracy"),
    ("KL to the reference, or to the sampler", "kl"),
    ("gradient norm", "grad_norm"),
    ("completion length, tokens", "completion_length"),
)

_INK, _QUIET, _LINE = "#1f6fd1", "#62676d", "#e3e5e8"  # as on the page of `jaxrl report`


def draw_run(entries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws reward, accuracy, KL, gradient norm and completion length over the steps.

    The entries come from `read_metrics`; a metric that was never logged has no panel.
    """
    import matplotlib.figure  # half a second to import, and drawn at the end of a run

    found = [
        (title, [(e["step"], e[name]) for e in entries if e.get(name) is not None])
        for title, name in PANELS
    ]
    panels = [(title, points) for title, points in found if points]
    columns = max(1, min(3, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure = matplotlib.figure.Figure(figsize=(5 * columns, 3.2 * rows), layout="constrained")
    for place, (title, points) in enumerate(panels, start=1):
        axis = figure.add_subplot(rows, columns, place)
        # Markers for a metric with few points, such as held-out accuracy.
        marker = "o" if len(points) < 30 else ""
        axis.plot(
            *zip(*points, strict=True), color=_INK, marker=marker, markersize=4, linewidth=1.4
        )
        axis.set_title(title, fontsize=10, loc="left", fontweight="bold")
        axis.set_xlabel("step", color=_QUIET)
        axis.tick_params(colors=_QUIET, length=0)
        axis.spines[:].set_visible(False)
        axis.grid(color=_LINE)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")
