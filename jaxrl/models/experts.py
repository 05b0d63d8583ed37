"""Mixtures of experts: routing, and one grouped matrix product over the tokens of all experts.

No token is dropped and no expert has a capacity: tokens are sorted by expert, and the product is
ragged (arXiv:2211.15841). Routing is computed in `accumulate`.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.core import blocks
from jaxrl.core.precision import DType
from jaxrl.models.components import ClampedGate, Experts
from jaxrl.models.layers import Layer, LayerContext, add_bias
from jaxrl.models.products import grouped_matmul, matmul


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
    here = experts.reshape(-1) - numbers[0]
    here = jnp.where((here >= 0) & (here < len(numbers)), here, len(numbers))  # others come last
    order = jnp.argsort(here, stable=True)
    # The place of each token's first expert, then of its second: sums over them are of whole rows.
    places = jnp.argsort(order).reshape(-1, chosen).T
    sizes = jnp.bincount(here, length=len(numbers) + 1)[:-1].astype(jnp.int32)
    # The ragged product leaves the rows of other devices' experts undefined.
    inside = (jnp.arange(len(order)) < jnp.sum(sizes))[:, None]
    has_all = len(numbers) == settings.count

    def own_rows(x):
        return x if has_all else jnp.where(inside, x, 0)

    tokens = own_rows(_sorted(x.reshape(-1, x.shape[-1]), order, places, precision.accumulate))
    product = functools.partial(grouped_matmul, sizes=sizes, precision=precision)
    rows = own_rows(here[order][:, None])[:, 0]  # the expert of each row

    def project(x, name):
        x = blocks.operand(x, name, precision)
        y = precision.rounded(product(x, own[name]), "products")
        if f"{name}_bias" not in own:
            return y
        bias = own[f"{name}_bias"].astype(precision.accumulate)
        # One device of those that share an expert's hidden units adds the bias of its output.
        added = inside & (units[0] == 0) if name == "expert_down" else inside
        return y + jnp.where(added, bias[rows], 0)

    if "expert_gate_up" in own:
        both = project(tokens, "expert_gate_up").astype(precision.accumulate)
        gate, up = both[:, ::2], both[:, 1::2]
    else:
        named = (project(tokens, name) for name in ("expert_gate", "expert_up"))
        gate, up = (y.astype(precision.accumulate) for y in named)
    hidden = gated_unit(gate, up, clamp=settings.clamp)
    y = project(precision.rounded(hidden, "products"), "expert_down")
    y = _of_tokens(own_rows(y), order, places)
    weights = weights.reshape(-1, chosen, 1)
    y = _added(y[i].astype(precision.accumulate) * weights[:, i] for i in range(chosen))
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


def _added(parts: Iterable[jax.Array] | jax.Array) -> jax.Array:
    """Adds arrays in order; the order of XLA's sum varies with shapes."""
    return functools.reduce(jnp.add, parts)


# Rows of tokens [N, D] and of their experts [N * k, D], sorted by expert. Entry n * k + i is token
# n's expert i; `order` [N * k] is the entry of each sorted row, `places` [k, N] the row of each
# entry. Each is the other's gradient: JAX's rule would add rows one after the other, as it does not
# know that each occurs once.


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sorted(x: jax.Array, order: jax.Array, places: jax.Array, dtype: DType) -> jax.Array:
    """Returns the sorted rows of the experts of tokens x [N, D], in `dtype`. A token's gradient
    sums over its experts, so it needs more than 8 or 11 bits of mantissa."""
    return _taken(x, order // len(places)).astype(dtype)


def _sorted_forward(x, order, places, dtype):
    return _sorted(x, order, places, dtype), (jnp.zeros(0, x.dtype), places)


def _sorted_backward(dtype, residuals, dy):
    like, places = residuals
    return _added(_taken(dy, places)).astype(like.dtype), None, None


@jax.custom_vjp
def _of_tokens(y: jax.Array, order: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the rows of each token's experts, [k, N, D], from sorted ones."""
    return _taken(y, places)


def _of_tokens_forward(y, order, places):
    return _taken(y, places), (order, places)


def _of_tokens_backward(residuals, dy):
    order, places = residuals
    token, choice = jnp.divmod(order, len(places))
    rows = dy.reshape(-1, dy.shape[-1])
    return _taken(rows, choice * dy.shape[1] + token), None, None


def _taken(x: jax.Array, rows: jax.Array) -> jax.Array:
    return x.at[rows].get(mode="promise_in_bounds")


_sorted.defvjp(_sorted_forward, _sorted_backward)
_of_tokens.defvjp(_of_tokens_forward, _of_tokens_backward)
