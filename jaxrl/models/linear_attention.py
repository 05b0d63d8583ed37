"""Linear attention of Qwen3-Next and Qwen3.5: a convolution, the gated delta rule, a gated norm."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl.models.attention.tree import KEPT
from jaxrl.models.components import Linear
from jaxrl.models.delta_rule import (
    Gates,
    causal_convolution,
    convolution_step,
    delta_rule,
    delta_step,
)
from jaxrl.models.layers import Layer, LayerContext, project, rms_norm

NOT_SHARED = "a linear layer's state belongs to one sequence"
"""Reason why completions cannot share a prompt."""


class LinearState(NamedTuple):
    """A linear layer's memory of the earlier tokens of each row."""

    inputs: jax.Array  # [B, W - 1, C] of the convolution, in `activations`
    states: jax.Array  # [B, H, dk, dv] of the delta rule, in `accumulate`


# (inputs of the convolution [B, T, C], gates) -> the delta rule's result [B, T, H, dv], and
# anything that the caller wants to keep.
Recurrence = Callable[[jax.Array, Gates], tuple[jax.Array, Any]]


def linear_attention(
    x: jax.Array, layer: Layer, recur: Recurrence, *, context: LayerContext
) -> tuple[jax.Array, Any]:
    """Computes linear attention of a normed stream [B, T, D]; returns the same shape, in
    `precision.activations`, and the second result of `recur`."""
    linear, precision = context.config.linear, context.precision
    assert linear is not None
    inputs, gate, gates = _project(x, layer, linear, context=context)
    out, kept = recur(inputs, gates)
    eps = context.config.rms_norm_eps
    out = rms_norm(out, layer["linear_norm"], eps=eps, precision=precision)
    gate = jax.nn.silu(gate.astype(precision.accumulate))
    out = (out.astype(precision.accumulate) * gate).astype(precision.activations)
    flat = out.reshape(*x.shape[:2], -1)
    return project(flat, layer, "linear_o", context=context), kept


def recur_rows(
    inputs: jax.Array, gates: Gates, layer: Layer, segments: jax.Array, *, context: LayerContext
) -> tuple[jax.Array, jax.Array]:
    """Computes the `Recurrence` of whole rows from states of zeros; also returns the states after
    them, as `delta_rule`."""
    # Recomputed for the gradient. If XLA kept parts of it, a step would round unlike the sampler.
    convolution = jax.checkpoint(functools.partial(causal_convolution, precision=context.precision))
    convolved = convolution(inputs, layer["conv"][:, 0], segments)
    heads = _heads(convolved, context)
    out, states = delta_rule(*heads, gates, segments, precision=context.precision)
    return checkpoint_name(out, KEPT), states


def recur_token(
    inputs: jax.Array, gates: Gates, layer: Layer, state: LinearState, *, context: LayerContext
) -> tuple[jax.Array, LinearState]:
    """Computes the `Recurrence` of one more token per row, [B, 1, C]; also returns the state."""
    precision = context.precision
    window = jnp.concatenate([state.inputs, inputs], axis=1)
    convolved = convolution_step(window, layer["conv"][:, 0], precision=precision)
    heads = _heads(convolved, context)
    out, states = delta_step(*heads, gates, state.states, precision=precision)
    return out, LinearState(window[:, 1:], states)


def last_inputs(inputs: jax.Array, lengths: jax.Array, *, width: int) -> jax.Array:
    """Returns the last `width` inputs [B, width, C] of rows [B, T, C] of i32[B] tokens; zeros where
    a row has fewer."""
    padded = jnp.pad(inputs, ((0, 0), (width, 0), (0, 0)))
    index = lengths[:, None] + jnp.arange(width)[None, :]
    return jnp.take_along_axis(padded, index[..., None], axis=1)


def _heads(x: jax.Array, context: LayerContext) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Divides the convolution's result [B, T, C] into queries and keys [B, T, K, dk] and values
    [B, T, H, dv]."""
    linear = context.config.linear
    assert linear is not None
    keys = linear.key_heads * linear.key_dim
    q, k, v = jnp.split(x, (keys, 2 * keys), axis=-1)
    q, k = (y.reshape(*x.shape[:2], linear.key_heads, linear.key_dim) for y in (q, k))
    return q, k, v.reshape(*x.shape[:2], linear.value_heads, linear.value_dim)


def _project(
    x: jax.Array, layer: Layer, linear: Linear, *, context: LayerContext
) -> tuple[jax.Array, jax.Array, Gates]:
    """Computes the convolution's inputs [B, T, C], the gate of the result [B, T, H, dv], and the
    gates of the delta rule, of a normed stream."""
    precision, shape = context.precision, x.shape[:2]
    if linear.split:
        names = ("linear_qkv", "linear_z", "linear_beta", "linear_step")
        inputs, gate, beta, step = (project(x, layer, one, context=context) for one in names)
    else:
        inputs, gate, beta, step = _divide(
            project(x, layer, "qkvz", context=context),
            project(x, layer, "gates", context=context),
            linear,
        )
    gate = gate.reshape(*shape, linear.value_heads, linear.value_dim)
    beta, step = (part.astype(precision.accumulate) for part in (beta, step))
    rate, shift = (
        layer[name].astype(precision.accumulate).reshape(1, 1, -1)
        for name in ("decay", "time_step")
    )
    decay = -jnp.exp(rate) * jax.nn.softplus(step + shift)
    return inputs, gate, Gates(decay, jax.nn.sigmoid(beta))


def _divide(qkvz: jax.Array, gates: jax.Array, linear: Linear) -> tuple[jax.Array, ...]:
    """Divides two projections [B, T, ...], which hold one key head after the other, into the
    convolution's inputs, the gate of the result, and the two gates of the delta rule."""
    shape, keys = qkvz.shape[:2], linear.key_heads
    own = linear.value_heads // keys * linear.value_dim
    sizes = (linear.key_dim, linear.key_dim, own)
    parts = jnp.split(
        qkvz.reshape(*shape, keys, -1), (sizes[0], sum(sizes[:2]), sum(sizes)), axis=-1
    )
    q, k, v, gate = (part.reshape(*shape, -1) for part in parts)
    pair = jnp.split(gates.reshape(*shape, keys, -1), 2, axis=-1)
    beta, step = (part.reshape(*shape, -1) for part in pair)
    return jnp.concatenate([q, k, v], axis=-1), gate, beta, step
