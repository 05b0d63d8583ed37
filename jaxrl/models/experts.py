"""Mixtures of experts: routing, and one grouped matrix product over the tokens of all experts.

No token is dropped and no expert has a capacity: tokens are sorted by expert, and the product is
ragged (arXiv:2211.15841). Routing is computed in `accumulate`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.core import blocks
from jaxrl.models import expert_rows as rows
from jaxrl.models.components import ClampedGate, Experts
from jaxrl.models.layers import Layer, LayerContext, add_bias
from jaxrl.models.products import matmul


class Routing(NamedTuple):
    """Routing decisions of one layer."""

    probs: jax.Array  # [B, T, E], over all experts, in `accumulate`; they sum to 1
    experts: jax.Array  # i32[B, T, k]
    weights: jax.Array  # [B, T, k], factors of the experts' outputs


def mixture(
    x: jax.Array, layer: Layer, *, context: LayerContext, recorded: jax.Array | None = None
) -> tuple[jax.Array, Routing]:
    """Computes a mixture of experts.

    Args:
      x: [B, T, D], the normed residual stream.
      layer: parameters of one layer.
      context: settings of all layers.
      recorded: i32[B, T, k], experts to use instead of the router's choice (routing replay,
        arXiv:2510.11370); negative for a token without a record. The weights are the router's own
        for these experts, so the router still learns.

    Returns:
      [B, T, D] to be added to the stream, and the routing.
    """
    config, precision = context.config, context.precision
    assert config.experts is not None
    routing = route(x, layer, context=context, recorded=recorded)
    tokens, names = ("routed", "length", "embed"), tuple(name for name in _AXES if name in layer)

    def contribution(x, experts, weights, numbers, units, *arrays):
        own = dict(zip(names, arrays, strict=True))
        return _mixture(x, experts, weights, numbers, units, own=own, context=context)

    run = context.local(
        contribution,
        inputs=(tokens, tokens, tokens, ("experts",), ("mlp",), *(_AXES[name] for name in names)),
        # Each device holds a part of the sum over experts and over their hidden units.
        output=("experts", "mlp", *tokens),
    )
    numbers = jnp.arange(config.experts.count, dtype=jnp.int32)
    units = jnp.arange(config.experts.intermediate_size, dtype=jnp.int32)
    # Before devices take their parts, which would have other blocks.
    own = (blocks.matrix(layer[name], name, precision) for name in names)
    parts = run(x, routing.experts, routing.weights, numbers, units, *own)
    y = precision.rounded(jnp.sum(parts, axis=(0, 1)), "products")
    return context.constrain(y, ("batch", "length", "embed")), routing


def route(
    x: jax.Array, layer: Layer, *, context: LayerContext, recorded: jax.Array | None = None
) -> Routing:
    """Chooses each token's experts by the largest scores (softmax or sigmoid), corrected if the
    config says so. Takes the arguments of `mixture`; logits are not rounded."""
    precision = context.precision
    settings = context.config.experts
    assert settings is not None
    wide = precision.inside("router")
    unrounded = dataclasses.replace(wide, activations=precision.accumulate)
    logits = matmul(x, layer["router"], precision=unrounded)
    logits = add_bias(logits, layer, "router", precision=unrounded)
    if settings.scores == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        probs = scores / jnp.sum(scores, axis=-1, keepdims=True)
    else:
        scores = probs = jax.nn.softmax(logits, axis=-1)
    chosen_by = lax.stop_gradient(scores)
    if settings.corrected:
        bias = lax.stop_gradient(layer["correction_f32"]).astype(precision.accumulate)
        chosen_by = _within_groups(chosen_by + bias.reshape(1, 1, -1), settings)
    _, experts = lax.top_k(chosen_by, settings.per_token)
    if recorded is not None:
        experts = jnp.where(jnp.any(recorded < 0, axis=-1, keepdims=True), experts, recorded)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if settings.renormalise:
        total = jnp.sum(weights, axis=-1, keepdims=True)
        # Sigmoids may all underflow.
        weights = weights / (total + 1e-20 if settings.scores == "sigmoid" else total)
    if settings.scale != 1:
        weights = weights * settings.scale
    return Routing(probs, experts, weights)


def gated_unit(gate: jax.Array, up: jax.Array, *, clamp: ClampedGate | None) -> jax.Array:
    """Computes silu(gate) * up, or the unit of `ClampedGate`; elementwise."""
    if clamp is None:
        return jax.nn.silu(gate) * up
    gate = jnp.minimum(gate, clamp.limit)
    up = jnp.clip(up, -clamp.limit, clamp.limit)
    return (up + 1) * gate * jax.nn.sigmoid(clamp.alpha * gate)


def _within_groups(scores: jax.Array, settings: Experts) -> jax.Array:
    """Masks scores [B, T, E] outside of each token's best groups. A group ranks by the sum of its
    two best scores (arXiv:2412.19437)."""
    if settings.chosen_groups == settings.groups:
        return scores
    grouped = scores.reshape(*scores.shape[:2], settings.groups, -1)
    totals = jnp.sum(lax.top_k(grouped, 2)[0], axis=-1)
    _, best = lax.top_k(totals, settings.chosen_groups)
    inside = jnp.any(jax.nn.one_hot(best, settings.groups, dtype=bool), axis=-2)
    return jnp.where(inside[..., None], grouped, -jnp.inf).reshape(scores.shape)


def imbalance(routing: Routing, segments: jax.Array) -> jax.Array:
    """Computes the load-balancing loss per token: f32[B, T], 0 at padding.

    Its mean over a sequence is E * sum over experts of (share of the sequence's tokens sent to the
    expert) * (the expert's mean probability) (arXiv:2101.03961, with the shares of one sequence as
    in arXiv:2412.19437). It equals k, the experts per token, when all experts are used equally.
    Shares are taken within a sequence, so packing and microbatches do not change the loss.
    """
    batch, length, count = routing.probs.shape
    rows = jnp.arange(batch)[:, None, None]
    zeros = jnp.zeros((batch, length + 1, count), jnp.float32)
    sent = zeros.at[rows, segments[:, :, None], routing.experts].add(1)
    tokens = jnp.sum(sent, axis=-1, keepdims=True) / routing.experts.shape[-1]
    shares = sent / jnp.maximum(tokens, 1)
    own = jnp.take_along_axis(shares, segments[:, :, None], axis=1)
    cost = count * jnp.sum(own * routing.probs.astype(jnp.float32), axis=-1)
    return jnp.where(segments > 0, cost, 0)


# The experts' parameters that a layer may have, without their first dimension.
_AXES = {
    "expert_gate": ("experts", "mlp", "embed"),
    "expert_up": ("experts", "mlp", "embed"),
    "expert_gate_up": ("experts", "mlp", "embed"),
    "expert_gate_up_bias": ("experts", "mlp"),
    "expert_down": ("experts", "embed", "mlp"),
    "expert_down_bias": ("experts", "embed"),
}


def _mixture(x, experts, weights, numbers, units, *, own, context):
    """Computes the contribution of the hidden units `units` [F] of the experts `numbers` [e] to the
    mixture, in `accumulate`: [1, 1, B, T, D]. `own` are their parameters by name, see `_AXES`."""
    precision = context.precision
    settings = context.config.experts
    _check_whole_blocks(len(units), settings.intermediate_size, kind=precision.blocks)
    *shape, chosen = experts.shape
    here = experts.reshape(-1, chosen) - numbers[0]
    here = jnp.where((here >= 0) & (here < len(numbers)), here, len(numbers))  # others come last
    order = rows.sort(here, count=len(numbers), whole=len(numbers) == settings.count)

    def bias(name, of):
        """The bias of each expert in `of`; that of an output only on one of the devices that share
        an expert's hidden units."""
        added = (of < len(numbers)) & ((units[0] == 0) | (name != "expert_down"))
        own_bias = own[f"{name}_bias"].astype(precision.accumulate)
        return jnp.where(added[:, None], own_bias[of], 0)

    fused = "expert_gate_up" in own
    names = ("expert_gate_up",) if fused else ("expert_gate", "expert_up")
    x = blocks.operand(x.reshape(-1, x.shape[-1]), names[0], precision)
    inner = rows.project(x, tuple(own[name] for name in names), order, precision)
    if f"{names[0]}_bias" in own:
        sorted_experts = here.reshape(-1)[order.entries]
        inner = tuple(y + bias(name, sorted_experts) for y, name in zip(inner, names, strict=True))
    if fused:
        inner = inner[0][:, ::2], inner[0][:, 1::2]
    gate, up = (y.astype(precision.accumulate) for y in inner)
    hidden = precision.rounded(gated_unit(gate, up, clamp=settings.clamp), "products")
    hidden = blocks.operand(hidden, "expert_down", precision)
    weights = weights.reshape(-1, chosen)
    y = rows.combine(hidden, weights, own["expert_down"], order, precision)
    if "expert_down_bias" in own:
        each = (bias("expert_down", here[:, i]) * weights[:, i, None] for i in range(chosen))
        y = y + rows.added(each, precision)
    return y.reshape(1, 1, *shape, x.shape[-1])


def _check_whole_blocks(units: int, whole: int, *, kind: str) -> None:
    """Checks that a device has whole blocks of eight bits among its `units` of an expert's `whole`
    hidden units.

    Raises:
      ValueError: if a block of eight-bit numbers is cut, which would have another factor.
    """
    if kind in ("e4m3", "rows") and units < whole and units % blocks.BLOCK:
        raise ValueError(
            f"blocks=e4m3, but each device has {units} of an expert's {whole} hidden units, which "
            f"is no multiple of {blocks.BLOCK}, so a block would be cut; use a smaller mesh.tensor "
            "and sampler.tensor, expert in their place, or leave blocks out"
        )
