"""The output layer: from hidden states to tempered logits."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.core.precision import Precision
from jaxrl.models.attention.scores import soft_cap
from jaxrl.models.products import matmul
from jaxrl.models.row_parts import Rows


class Head(NamedTuple):
    """The output layer."""

    weights: jax.Array  # [V, D], tied to the embedding or not
    cap: float | None = None  # soft cap of the logits, see `scores.soft_cap`
    temperature: float | jax.Array = 1.0  # divides the capped logits; no gradient flows to it
    # Where there are parts, the gradient of the weights is summed in each over all chunks, and over
    # devices once, at the price of a whole f32[V, D].
    rows: Rows = Rows()
    # B [V, rank] of an adapter; hidden states are then [x, A x], so that W x + B (A x) is one
    # product. The weights have no gradient beside it.
    adapter: jax.Array | None = None


def beside(weights: jax.Array, adapter: jax.Array | None) -> jax.Array:
    """Returns the matrix [V, D + rank] of weights and an adapter; the weights without one."""
    return weights if adapter is None else jnp.concatenate([weights, adapter], axis=1)


def rounded_logits(products: jax.Array, head: Head, *, precision: Precision) -> jax.Array:
    """Caps products of hidden states and weights, and rounds them to `logits`."""
    return soft_cap(products, head.cap).astype(precision.logits)


def tempered(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """Divides logits by a temperature, with the same rounding in the learner and the sampler.

    XLA divides by a constant differently than by a variable, and may fuse the product with a later
    sum. The maximum with the lowest number prevents the fusion and changes nothing.
    """
    lowest = jnp.finfo(logits.dtype).min
    return jnp.maximum(logits * (1 / temperature), lowest)


def whole_logits(hidden: jax.Array, head: Head, *, precision: Precision | str) -> jax.Array:
    """Computes tempered logits of the whole vocabulary from hidden states after the final norm,
    [..., D] -> [..., V], in `logits` or f32, the wider of the two. Few positions at a time fit."""
    precision = Precision.of(precision)
    wide = dataclasses.replace(precision, activations=precision.accumulate)
    z = rounded_logits(
        matmul(hidden, beside(head.weights, head.adapter), precision=wide),
        head,
        precision=precision,
    )
    stats = jnp.promote_types(precision.logits, jnp.float32)
    return tempered(z.astype(stats), jnp.asarray(head.temperature, stats))
