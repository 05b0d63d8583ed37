"""Draws a token from logits and computes its log-probability."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxrl.core.kept import among, encode, most_kept
from jaxrl.models.adapter_rows import AdapterRows
from jaxrl.models.output_layer import tempered
from jaxrl.sampling.base import SamplingParams
from jaxrl.sampling.embedded.stopping import Stops, make_stops
from jaxrl.sampling.embedded.truncation import Truncation, truncate, truncation


@struct.dataclass(kw_only=True)
class DrawSettings:
    """Sampling parameters as arrays, so that all values share the compiled program."""

    temperature: jax.Array | None  # f32[]; None is greedy; f32[B], of each row, 0 is greedy
    truncation: Truncation
    stops: Stops
    record: bool = struct.field(pytree_node=False)  # the tokens that truncation keeps


@struct.dataclass(kw_only=True)
class RowSettings:
    """Settings of each row of a batch, for requests whose turns have their own."""

    temperature: Any  # f32[B]; 0 is greedy
    truncation: Truncation  # arrays [B]
    stops: Any  # i32[B, M, S], see `Stops`
    texts: Any  # i32[B], see `Stops`; None without texts
    adapters: AdapterRows | None  # None without adapters

    def drawing(self, shared: DrawSettings) -> DrawSettings:
        """Returns the settings of drawing a token for each row."""
        stops = dataclasses.replace(shared.stops, table=self.stops, chosen=self.texts)
        return dataclasses.replace(
            shared, temperature=self.temperature, truncation=self.truncation, stops=stops
        )


class Drawn(NamedTuple):
    """Tokens drawn for a batch."""

    tokens: jax.Array  # i32[B]
    logprobs: jax.Array  # f32[B]
    kept: jax.Array | None  # u8[B, 32], see `core.kept`; None if they are not recorded


def draw_settings(params: SamplingParams, *, record_kept: bool = False) -> DrawSettings:
    """Returns the settings of a request. Greedy decoding ignores truncation, which always keeps the
    most probable token."""
    greedy = params.temperature == 0
    return DrawSettings(
        temperature=None if greedy else jnp.float32(params.temperature),
        truncation=Truncation() if greedy else truncation(params),
        stops=make_stops(params),
        record=record_kept and params.truncated and not greedy,
    )


def draw_tokens(logits: jax.Array, keys: jax.Array, *, settings: DrawSettings) -> Drawn:
    """Draws one token per row of logits [B, V], with a key per row, key[B].

    Log-probs are of the distribution that the tokens are drawn from: tempered, truncated and
    renormalised. Greedy tokens have the log-prob at temperature 1.
    """
    kept, greedy, temperature = None, None, settings.temperature
    logits = logits.astype(jnp.float32)
    if temperature is not None and jnp.ndim(temperature):
        greedy = temperature == 0
        temperature = jnp.where(greedy, 1, temperature)[:, None]
    if temperature is not None:
        logits = tempered(logits, temperature)
    logits = logits - jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(logits)
    if temperature is None:
        tokens = _first(logits >= 0)
    else:
        weights = truncate(weights, settings.truncation)
        if settings.record:
            weights, kept = _recorded(weights)
        uniforms = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
        tokens = categorical(weights, uniforms)
        if greedy is not None:
            tokens = jnp.where(greedy, _first(logits >= 0), tokens)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return Drawn(tokens, chosen - jnp.log(jnp.sum(weights, axis=-1)), kept)


def _recorded(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns truncated weights f32[B, V] and the records u8[B, 32] of the tokens above 0.

    Of tokens as probable as the last one that a record has room for, the first in the vocabulary
    are kept.
    """
    vocab_size = weights.shape[-1]
    top, ids = lax.top_k(weights, most_kept(vocab_size))
    ids = jnp.where(top > 0, ids, ids[:, :1])
    kept = among(ids, jnp.arange(vocab_size))
    return jnp.where(kept, weights, 0), encode(ids, vocab_size)


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
