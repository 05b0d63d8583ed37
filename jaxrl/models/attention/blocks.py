"""Causal attention within segments that keeps no [T, T] array for the backward pass."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.core.packing import ANYWHERE, Alignment
from jaxrl.core.precision import Precision
from jaxrl.core.runs import Runs
from jaxrl.models.attention.scores import Scoring
from jaxrl.models.attention.tree import KEPT, flat, pad, sink_gradient, tree_attention
from jaxrl.models.attention.visible import Tree, in_segments
from jaxrl.models.products import ADDED, named, product, transposed_product

# Keys are padded to a multiple of this number. XLA's products then add in the same order whatever
# the number of keys, and masked keys add exactly 0: a token's result does not depend on the length
# of its row. Sequences of a packed row begin at multiples of it where sums are fixed.
TILE = 64

# Queries go in blocks, each against the keys up to its own end: that skips almost half of the
# scores, and only one block's scores exist at once. The program grows with the number of blocks.
# With a window, blocks of half its size skip most of the hidden keys.
_MIN_BLOCK, _MAX_BLOCKS, _MAX_WINDOWED = 128, 8, 32


class Block(NamedTuple):
    """A range of queries and the range of keys that they may see, by index in the row."""

    start: int
    stop: int
    first: int
    end: int

    @property
    def queries(self) -> tuple[Any, ...]:
        """Index of the queries, or of results for them: [..., T, hd]."""
        return (..., slice(self.start, self.stop), slice(None))

    @property
    def keys(self) -> tuple[Any, ...]:
        """Index of keys or values [..., S, hd]."""
        return (..., slice(self.first, self.end), slice(None))


class Part(NamedTuple):
    """Position of queries that are part of their rows; keys and values cover the whole rows."""

    first: jax.Array  # i32[], index of the first query in the row
    segments: Any  # i32[B, S], segments of the whole rows, or their Tree


class Mask(NamedTuple):
    """The keys that queries may see; see `attention`."""

    segments: jax.Array  # i32[B, T], of the queries
    of_keys: jax.Array  # i32[B, S]
    first: jax.Array  # i32[], index of the first query in the row
    scoring: Scoring


# Takes the arguments of `attention`, but for `part`, and returns its result.
Attend = Callable[..., jax.Array]


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | Tree,
    *,
    scoring: Scoring,
    precision: Precision,
    part: Part | None = None,
    runs: Runs | None = None,
) -> jax.Array:
    """Computes grouped-query attention over whole sequences (arXiv:1706.03762, 2305.13245).

    A token attends to the tokens of its own segment up to itself, by their index in the row.
    Padding is a segment of its own: every row of the softmax has an entry, and padding never
    affects a real token. The backward pass recomputes the probabilities from q, k and the log of
    the softmax's denominator (arXiv:2205.14135).

    Args:
      q: [B, T, H, hd].
      k: [B, S, K, hd], H a multiple of K; query head h reads key head h // (H / K). S is T, or with
        `part` the length of the whole row.
      v: [B, S, K, vd].
      segments: i32[B, T], 0 for padding; or the Tree of rows whose sequences share prefixes, which
        `tree_attention` computes.
      scoring: the window, scale, cap and sinks of the scores.
      precision: the dtype policy; scores and softmax are in `accumulate`.
      part: the part of their rows that the queries are; None for whole rows.
      runs: bounds of the rows' runs, for kernels that need them; this one does not.

    Returns:
      [B, T, H, vd] in `precision.activations`.
    """
    if isinstance(segments, Tree):
        first, keys = (0, segments) if part is None else part
        queries = (segments.positions, jnp.int32(first))
        return tree_attention(q, k, v, keys, queries, scoring=scoring, precision=precision)
    (batch, length, heads, _), width = q.shape, v.shape[-1]
    groups = heads // k.shape[2]
    # The query heads of a key head stand side by side: one product serves all of them, and keys are
    # never repeated.
    q = q.reshape(batch, length, -1, groups, q.shape[-1]).transpose(0, 2, 3, 1, 4)
    sinks = scoring.sink_scores(kv_heads=k.shape[2], ndim=5, dtype=precision.accumulate)
    k, v = (pad(x.transpose(0, 2, 1, 3), TILE, axis=2) for x in (k, v))
    first, of_keys = (0, segments) if part is None else part
    # No segment is numbered -1, so no query sees a padded key.
    of_keys = jnp.pad(of_keys, ((0, 0), (0, k.shape[2] - of_keys.shape[1])), constant_values=-1)
    # Sinks are an argument of their own because they have a gradient; the mask has none.
    mask = Mask(segments, of_keys, jnp.int32(first), dataclasses.replace(scoring, sinks=None))
    out = _attention(q, k, pad_values(v, precision), sinks, mask, precision, part is None)
    return out[..., :width].transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, width)


def sequence_alignment(precision: Precision | str) -> Alignment:
    """Returns where packed sequences may begin. With fixed sums, their keys have the same places in
    XLA's products as if each sequence had its own row."""
    fixed = Precision.of(precision).sums == "fixed"
    return Alignment(start=TILE, block=ADDED) if fixed else ANYWHERE


def pad_values(v: jax.Array, precision: Precision) -> jax.Array:
    """Appends zeros to values [..., hd] up to a multiple of TILE, if the order of sums is
    fixed: on CPU, XLA has another order for narrower matrices in a small batch."""
    return pad(v, TILE, axis=v.ndim - 1) if precision.sums == "fixed" else v


def softmax_product(
    scores: jax.Array, v: jax.Array, sinks: jax.Array | None, *, precision: Precision
) -> tuple[jax.Array, jax.Array]:
    """Averages values with softmax weights. The weights are rounded before they are divided by
    their sum: in training and in decoding alike, or their log-probs would differ.

    Args:
      scores: [B, K, ..., S] in `accumulate`.
      v: [B, K, S, hd].
      sinks: see `Scoring.sink_scores`; they count in the sum of the weights alone.
      precision: the dtype policy.

    Returns:
      The average [B, K, ..., hd] in `activations`, and the log of the sums [B, K, ..., 1].
    """
    # Weights relative to the largest score cannot overflow; the quotient is the same.
    largest = jnp.max(scores, axis=-1, keepdims=True)
    if sinks is not None:
        largest = jnp.maximum(largest, sinks)
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - largest)
    out = product(weights, v, contract=(scores.ndim - 1, 2), batch=(0, 1), precision=precision)
    # Divided after the product: one division per output instead of one per weight.
    return (out / total).astype(precision.activations), largest + jnp.log(total)


def _forward(q, k, v, sinks, mask, precision, whole):
    q, k, v = (x.astype(precision.compute) for x in (q, k, v))
    found = []
    for block in _blocks(q, k, mask, precision, whole=whole):
        scores = _scores(q, k, mask, block, precision=precision)
        found.append(softmax_product(scores, v[block.keys], sinks, precision=precision))
    # With these two kept, a remat policy saves the backward pass a second forward pass.
    out, log_total = (
        named(jnp.concatenate(parts, axis=3), KEPT) for parts in zip(*found, strict=True)
    )
    return out, (q, k, v, sinks, out, log_total, mask)


def _backward(precision, whole, residuals, dout):
    q, k, v, sinks, out, log_total, mask = residuals
    dot = functools.partial(product, batch=(0, 1), precision=precision)
    dot_t = functools.partial(transposed_product, batch=(0, 1), precision=precision)
    # The softmax's derivative subtracts the mean of dprobs, weighted by probs. This mean equals the
    # product of output and output gradient, so that it needs no array of scores (arXiv:2205.14135).
    mean = jnp.sum(
        dout.astype(precision.accumulate) * out.astype(precision.accumulate), axis=-1, keepdims=True
    )
    dout = dout.astype(precision.compute)
    dqs = []
    # Transposed, so that no product transposes an array of scores.
    dk, dv = (jnp.zeros(x.swapaxes(2, 3).shape, precision.accumulate) for x in (k, v))
    for block in _blocks(q, k, mask, precision, whole=whole):
        rows, keys = block.queries, block.keys
        scores = _scores(q, k, mask, block, precision=precision)
        # The forward pass kept the log of the sums, so weights come out divided at once.
        probs = jnp.exp(scores - log_total[rows])
        dprobs = dot(dout[rows], v[keys], contract=(4, 3))
        slopes = mask.scoring.slopes(scores)
        dscores = probs * (dprobs - mean[rows]) * slopes
        probs, dscores = probs.astype(precision.compute), dscores.astype(precision.compute)
        dqs.append(dot(dscores, k[keys], contract=(4, 2)))
        dk = _add(dk, block.first, dot_t(flat(q[rows]), flat(dscores)))
        dv = _add(dv, block.first, dot_t(flat(dout[rows]), flat(probs)))
    grads = (jnp.concatenate(dqs, axis=3), dk.swapaxes(2, 3), dv.swapaxes(2, 3))
    dsinks = sink_gradient(sinks, log_total=log_total, mean=mean)
    # Blocks were added in `accumulate`; gradients are rounded once.
    return (*(x.astype(precision.activations) for x in grads), dsinks, None)


_attention: Any = jax.custom_vjp(lambda *args: _forward(*args)[0], nondiff_argnums=(5, 6))
_attention.defvjp(_forward, _backward)


def _blocks(
    q: jax.Array, k: jax.Array, mask: Mask, precision: Precision, *, whole: bool
) -> list[Block]:
    """Lists the blocks of queries with the keys that they may see: all keys if the queries are part
    of their rows, since their start is then not known at compile time."""
    length, keys, window = q.shape[3], k.shape[2], mask.scoring.window
    size = max(_MIN_BLOCK, -(-length // _MAX_BLOCKS // TILE) * TILE)
    if not whole:
        return [Block(i, min(i + size, length), 0, keys) for i in range(0, length, size)]
    # Without a window every query sees back to the row's first key.
    back = keys
    if window is not None:
        back, most = window - 1, -(-length // _MAX_WINDOWED // TILE) * TILE
        size = min(size, max(_MIN_BLOCK, most, -(-window // 2 // TILE) * TILE))
    # Products add the other keys in the same order, as of rows that begin there.
    step = ADDED if precision.sums == "fixed" else TILE
    return [
        Block(i, min(i + size, length), max(0, i - back) // step * step, min(i + size, keys))
        for i in range(0, length, size)
    ]


def _add(total, first, part):
    """Adds to columns of an array, from `first` on. `at[...].add` to all columns would have no
    index, and jaxlib 0.11 crashes on empty arrays in shard_map (docs/internals/xla.md)."""
    sums = total[..., first : first + part.shape[-1]] + part
    return jax.lax.dynamic_update_slice(total, sums, (*(0,) * (total.ndim - 1), first))


def _scores(q, k, mask: Mask, block: Block, *, precision):
    """Computes scores of a block; the lowest finite number where a key is masked."""
    start, stop, first, end = block
    q, k = q[block.queries], k[block.keys]
    products = product(q, k, contract=(4, 3), batch=(0, 1), precision=precision)
    scores = mask.scoring.scores(products)
    distance = mask.first + jnp.arange(start, stop)[:, None] - jnp.arange(first, end)[None, :]
    segments, of_keys = mask.segments[:, start:stop], mask.of_keys[:, first:end]
    seen = in_segments(segments, of_keys, distance, window=mask.scoring.window)
    # Its exponential is exactly 0, and unlike -inf it turns no difference into NaN.
    return jnp.where(seen[:, None, None], scores, jnp.finfo(scores.dtype).min)
