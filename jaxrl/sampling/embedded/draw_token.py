"""Draws a token from logits and computes its log-probability."""

import math

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.models.logprobs import tempered
from jaxrl.sampling.base import SamplingParams
from jaxrl.sampling.embedded.stopping import Stops, make_stops
from jaxrl.sampling.embedded.truncation import Truncation, truncate, truncation


@struct.dataclass(kw_only=True)
class DrawSettings:
    """Sampling parameters as arrays, so that all values share the compiled program."""

    temperature: jax.Array | None  # f32[]; None is greedy
    truncation: Truncation
    stops: Stops


def draw_settings(params: SamplingParams) -> DrawSettings:
    """Returns the settings of a request. Greedy decoding ignores truncation, which always keeps the
    most probable token."""
    greedy = params.temperature == 0
    return DrawSettings(
        temperature=None if greedy else jnp.float32(params.temperature),
        truncation=Truncation() if greedy else truncation(params),
        stops=make_stops(params),
    )


def draw_tokens(
    logits: jax.Array, keys: jax.Array, *, settings: DrawSettings
) -> tuple[jax.Array, jax.Array]:
    """Draws one token per row of logits [B, V], with a key per row, key[B].

    Returns:
      i32[B] tokens and f32[B] their log-probs under the distribution they were drawn from:
      tempered, truncated and renormalised. Greedy tokens have the log-prob at temperature 1.
    """
    logits = logits.astype(jnp.float32)
    if settings.temperature is not None:
        logits = tempered(logits, settings.temperature)
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits)
    if settings.temperature is None:
        tokens = _first(logits >= 0)
    else:
        weights = truncate(weights, settings.truncation)
        uniforms = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
        tokens = categorical(weights, uniforms)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - jnp.log(jnp.sum(weights, axis=-1))


def categorical(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Draws tokens, i32[B], by inverting the cumulative sum of weights f32[B, V] >= 0; never one of
    weight 0.

    A first uniform number of f32[B, 2] chooses a block of about sqrt(V) tokens, the second a token
    in it. Gumbel-max needs V random numbers and logarithms per row and takes four times as long,
    measured at V = 4096 on CPU. Each step resolves probabilities down to 2**-23.
    """
    rows, vocabulary = weights.shape
    size = math.isqrt(vocabulary - 1) + 1
    blocks = jnp.pad(weights, ((0, 0), (0, -vocabulary % size))).reshape(rows, -1, size)
    block = _invert(jnp.sum(blocks, axis=-1), uniforms[:, 0])
    members = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * size + _invert(members, uniforms[:, 1])


def _invert(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Returns the index of the first positive weight whose cumulative sum exceeds uniform * total,
    i32[B]."""
    sums = jnp.cumsum(weights, axis=-1)
    index = _first((sums > uniforms[:, None] * sums[:, -1:]) & (weights > 0))
    # If uniform is close to 1, rounding can leave no such entry: take the largest weight instead.
    largest = _first(weights >= jnp.max(weights, axis=-1, keepdims=True))
    return jnp.where(index < weights.shape[-1], index, largest)


def _first(hit: jax.Array) -> jax.Array:
    """Returns the index of the first true entry of each row of bool[B, N], or N; i32[B].

    XLA on CPU runs argmax, a reduction of two operands, several times slower than this one.
    """
    index = jnp.arange(hit.shape[-1], dtype=jnp.int32)[None, :]
    return jnp.min(jnp.where(hit, index, hit.shape[-1]), axis=-1)
