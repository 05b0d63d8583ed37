"""Which mesh axes cut which logical axis: data, not code.

A parameter and an activation may both have an axis "embed" and want it cut differently: fully
sharded parameters are cut along the hidden size, activations along the batch. So there are two
tables.
"""

import dataclasses
from collections.abc import Mapping

MeshAxes = tuple[str, ...]  # cut over these, the first one slowest; () is not cut


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Logical axis -> mesh axes. Every logical axis that is used must be named, even if uncut.

    Attributes:
      parameters: for the axes that parameters declare.
      activations: for batches and for what a model passes to `constrain`.
    """

    parameters: tuple[tuple[str, MeshAxes], ...]
    activations: tuple[tuple[str, MeshAxes], ...]


_Table = Mapping[str, str | MeshAxes]

_WHOLE: _Table = dict.fromkeys(
    ("layers", "vocab", "embed", "q_heads", "kv_heads", "mlp", "norm"), ()
)
_BATCH_CUT: _Table = {
    "batch": ("data", "fsdp"),
    **dict.fromkeys(("length", "vocab", "embed", "q_heads", "kv_heads", "mlp"), ()),
}
_FSDP: _Table = {"embed": "fsdp"}
_TENSOR: _Table = dict.fromkeys(("vocab", "q_heads", "kv_heads", "mlp"), "tensor")


def make_rules(*, parameters: _Table, activations: _Table) -> Rules:
    """The tables in which only the batch is cut, with changes.

    Args:
      parameters: changes, for example `{"embed": "fsdp"}`, or a new logical axis; a bare name
        stands for one mesh axis.
      activations: likewise, for example `{"mlp": "tensor"}`.
    """
    return Rules(
        parameters=_freeze({**_WHOLE, **parameters}),
        activations=_freeze({**_BATCH_CUT, **activations}),
    )


def _freeze(table: _Table) -> tuple[tuple[str, MeshAxes], ...]:
    return tuple((k, (v,) if isinstance(v, str) else v) for k, v in table.items())


PRESETS: dict[str, Rules] = {
    # Every device holds all parameters.
    "data": make_rules(parameters={}, activations={}),
    # Parameters and optimizer state cut along the hidden size, gathered where they are used.
    "fsdp": make_rules(parameters=_FSDP, activations={}),
    # Heads, feed-forward columns and vocabulary cut; one sum over devices after each block.
    "tensor": make_rules(parameters=_TENSOR, activations=_TENSOR),
    # Both: with an axis of size 1 it equals one of the above.
    "fsdp_tensor": make_rules(parameters={**_FSDP, **_TENSOR}, activations=_TENSOR),
}
