"""Truncation of a distribution by min-p, top-k and top-p, without sorting the vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxrl.sampling.base import SamplingParams


@struct.dataclass(kw_only=True)
class Truncation:
    """Truncation settings in the order in which they apply, as in vLLM.

    None compiles to nothing. Other values are arrays, so that they share a compiled program: one
    for all rows or, as f32[B] or i32[B], one for each, where 0 (top_p: 1) keeps all tokens.
    """

    min_p: jax.Array | None = None  # f32[], share of the largest probability
    top_k: jax.Array | None = None  # i32[], number of tokens
    top_p: jax.Array | None = None  # f32[], probability


def truncation(params: SamplingParams) -> Truncation:
    """Returns the truncation settings of a request."""
    return Truncation(
        min_p=jnp.float32(params.min_p) if params.min_p > 0 else None,
        top_k=jnp.int32(params.top_k) if params.top_k > 0 else None,
        top_p=jnp.float32(params.top_p) if params.top_p < 1 else None,
    )


def truncate(weights: jax.Array, settings: Truncation) -> jax.Array:
    """Sets the weights of dropped tokens to 0, without renormalising.

    `weights` are probabilities f32[B, V], scaled so that the largest of each row is 1. Each setting
    keeps the tokens above a threshold, found by binary search over its bits. Tokens as probable as
    the last one kept are kept too, so the result does not depend on the order of the vocabulary.
    """
    if settings.min_p is not None:
        weights = _above(weights, jnp.broadcast_to(settings.min_p, weights.shape[:1]))
    if settings.top_k is not None:
        k = settings.top_k

        def enough_tokens(kept: jax.Array) -> jax.Array:
            return jnp.sum(kept > 0, axis=-1) >= k

        threshold = _largest_threshold(weights, enough_tokens)
        weights = _above(weights, jnp.where(k > 0, threshold, 0))
    if settings.top_p is not None:
        goal = settings.top_p * jnp.sum(weights, axis=-1)

        def enough_probability(kept: jax.Array) -> jax.Array:
            return jnp.sum(kept, axis=-1) >= goal

        threshold = _largest_threshold(weights, enough_probability)
        weights = _above(weights, jnp.where(settings.top_p < 1, threshold, 0))
    return weights


def _above(weights: jax.Array, threshold: jax.Array) -> jax.Array:
    return jnp.where(weights >= threshold[:, None], weights, 0)


def _largest_threshold(weights: jax.Array, enough) -> jax.Array:
    """Returns the largest threshold in [0, 1] at which a row keeps enough, f32[B]; 0 if none does.

    Non-negative floats are ordered like their bits as integers, so a binary search over the bits is
    exact. It takes 30 passes.
    """
    one = int(np.float32(1).view(np.int32))

    def narrow(_, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # enough is kept at low and not at high
        middle = low + (high - low) // 2
        fits = enough(_above(weights, lax.bitcast_convert_type(middle, jnp.float32)))
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

    low = jnp.zeros(weights.shape[:1], jnp.int32)
    low, _ = lax.fori_loop(0, one.bit_length(), narrow, (low, jnp.full_like(low, one + 1)))
    return lax.bitcast_convert_type(low, jnp.float32)
