"""Sharding rules, as data: logical axis -> mesh axes.

Parameters and activations have separate tables. Both may have an axis "embed" that must be cut
differently: fully sharded parameters are cut along the hidden size, activations along the batch.
"""

import dataclasses
from collections.abc import Mapping, Sequence

MeshAxes = tuple[str, ...]  # cut over these, the first one slowest; () is not cut


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """Tables of logical axis -> mesh axes. Every logical axis in use must be listed, even if uncut.

    `activations` applies to batches and to arrays that a model passes to `constrain`.
    """

    parameters: tuple[tuple[str, MeshAxes], ...]
    activations: tuple[tuple[str, MeshAxes], ...]


_Table = Mapping[str, str | MeshAxes]

_BOTH_KNOW = ("vocab", "embed", "q_heads", "kv_heads", "mlp", "experts")
_WHOLE: _Table = dict.fromkeys(
    ("layers", *_BOTH_KNOW, "fused", "norm", "router", "label", "rank", "latent", "conv"), ()
)
# "routed" is the batch inside expert layers: every device with experts sees all of its tokens.
_BATCH_CUT: _Table = {
    **dict.fromkeys(("batch", "routed"), ("data", "fsdp")),
    **dict.fromkeys(("length", "head_dim", "chunk", *_BOTH_KNOW), ()),
}
_FSDP: _Table = {"embed": "fsdp"}
_TENSOR: _Table = dict.fromkeys(("vocab", "q_heads", "kv_heads", "mlp"), "tensor")
_EXPERTS: _Table = {"experts": "expert"}
# Outside expert layers the expert axis cuts the batch as well.
_EXPERT_BATCH: _Table = {**_EXPERTS, "batch": ("data", "fsdp", "expert")}
_LENGTH: _Table = {"length": "context"}
_EMBED: _Table = {"embed": ("fsdp", "context")}


def make_rules(*, parameters: _Table, activations: _Table) -> Rules:
    """Makes rules from the default tables, in which only the batch is cut, with changes.

    A change is for example `{"embed": "fsdp"}`, or a new logical axis; a bare name stands for one
    mesh axis.
    """
    return Rules(
        parameters=_freeze({**_WHOLE, **parameters}),
        activations=_freeze({**_BATCH_CUT, **activations}),
    )


def change(rules: Rules, *, parameters: Sequence[str], activations: Sequence[str]) -> Rules:
    """Applies changes written as text, such as "embed=fsdp+context" or "vocab=".

    Raises:
      ValueError: if a text is not a rule, or names a logical axis that is unknown or was already
        changed.
    """
    return make_rules(
        parameters=_changed(dict(rules.parameters), parameters),
        activations=_changed(dict(rules.activations), activations),
    )


def by_rows(rules: Rules) -> Rules:
    """Returns rules that divide no sum over devices: parameters lie as before, and each axis that
    would cut a product cuts the rows of a batch instead. Weights are gathered for each product, so
    that one device adds up a token's numbers in the order of a device that is alone. The tokens of
    a row stay cut where they are."""
    activations = dict(rules.activations)
    batch, length = activations["batch"], activations["length"]
    named = {axis for _, axes in (*rules.parameters, *rules.activations) for axis in axes}
    rows = (*batch, *sorted(named - {*batch, *length}))
    whole: _Table = dict.fromkeys(activations, ())
    cut: _Table = {"batch": rows, "routed": rows, "length": length}
    return Rules(parameters=rules.parameters, activations=_freeze({**whole, **cut}))


def instead_of_length(rules: Rules, *, axes: Sequence[str]) -> Rules:
    """Returns rules for activations of which each device has whole rows of tokens: the mesh axes
    that cut them cut these logical axes too, after those that do already."""
    activations = dict(rules.activations)
    more = {axis: (*activations[axis], *activations["length"]) for axis in axes}
    return Rules(
        parameters=rules.parameters, activations=_freeze({**activations, "length": (), **more})
    )


def _changed(table: Mapping[str, MeshAxes], texts: Sequence[str]) -> dict[str, MeshAxes]:
    found: dict[str, MeshAxes] = {}
    for text in texts:
        logical, equals, axes = text.partition("=")
        if not equals or not logical or logical in found:
            raise ValueError(
                f"rule {text!r}: expected one LOGICAL=MESH+MESH for each logical axis, such as "
                "'embed=fsdp+context', or 'vocab=' for an axis that is not cut"
            )
        if logical not in table:
            raise ValueError(
                f"rule {text!r}: there is no logical axis {logical!r}; known are {', '.join(table)}"
            )
        found[logical] = tuple(axes.split("+")) if axes else ()
    return {**table, **found}


def _freeze(table: _Table) -> tuple[tuple[str, MeshAxes], ...]:
    return tuple((k, (v,) if isinstance(v, str) else v) for k, v in table.items())


_CHANGES: dict[str, tuple[_Table, _Table]] = {  # of parameters, of activations
    # Every device holds all parameters.
    "data": ({}, {}),
    # Parameters and optimizer state cut along the hidden size, gathered where they are used.
    "fsdp": (_FSDP, {}),
    # Heads, feed-forward columns and vocabulary cut; one sum over devices after each block.
    "tensor": (_TENSOR, _TENSOR),
    # Both: with an axis of size 1 it equals one of the above.
    "fsdp_tensor": ({**_FSDP, **_TENSOR}, _TENSOR),
    # Each device has some experts of every layer and sends tokens to the devices of their experts.
    "expert": ({**_FSDP, **_TENSOR, **_EXPERTS}, {**_TENSOR, **_EXPERT_BATCH}),
    # Long rows: tokens cut over devices, heads for attention.
    "context": ({**_EMBED, **_TENSOR}, {**_TENSOR, **_LENGTH}),
    # Everything: with the other axes at size 1 it equals any of the above.
    "all": ({**_EMBED, **_TENSOR, **_EXPERTS}, {**_TENSOR, **_EXPERT_BATCH, **_LENGTH}),
}
PRESETS = {name: make_rules(parameters=p, activations=a) for name, (p, a) in _CHANGES.items()}
"""Rules by name, such as "fsdp"."""
