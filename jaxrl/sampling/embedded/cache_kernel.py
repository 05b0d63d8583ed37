"""Attention of one token per row over a cache, on NVIDIA GPUs: one pass over the slots it may see.

XLA copies each layer out of the cache before it multiplies it, and reads the slots that no token
fills. Pallas hands this kernel to the Triton that XLA contains. Its programs divide the slots of a
row between them, and XLA joins their sums (arXiv:2205.14135).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.core.half_bits import from_bits
from jaxrl.core.precision import Precision
from jaxrl.models.attention.scores import Scoring
from jaxrl.models.layers import Local

_QUERIES = 16  # the fewest rows that Triton multiplies
_BLOCK = 2**14  # bytes of keys that a program reads at a time
_PROGRAMS = 264  # two for each core of the largest GPUs
_FEWEST = 256  # slots of a program


class Settings(NamedTuple):
    """Static settings of one call."""

    scoring: Scoring  # without its sinks
    precision: Precision
    interpret: bool = False


def computes(precision: Precision) -> bool:
    """Tells if the kernel computes the products of a dtype policy. It adds in an order of its own,
    so `sums` must be any."""
    return precision.sums == "any" and precision.algorithm is lax.Precision.HIGHEST


def attend(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    place: jax.Array,
    positions: jax.Array,
    *,
    scoring: Scoring,
    precision: Precision,
    local: Local,
) -> jax.Array:
    """Computes attention of one token per row, on each device for its own rows and heads.

    Args:
      q: [B, 1, H, hd].
      keys: [L, B, K, S, hd], in the form of `to_bits`.
      values: [L, B, K, S, vd], in the same form.
      place: i32[], the layer.
      positions: i32[B, 1], of the tokens.
      scoring: the window, scale, cap and sinks of the scores.
      precision: the dtype policy.
      local: as in `LayerContext`.

    Returns:
      [B, 1, H, vd] in `activations`.
    """
    batch, _, heads, dim = q.shape
    kv_heads = keys.shape[2]
    settings = Settings(dataclasses.replace(scoring, sinks=None), precision)
    cut, whole = ("batch", "kv_heads"), "head_dim"  # no device has a part of a head
    of_cache = (whole, *cut, whole, whole)
    run = local(
        functools.partial(attend_slots, settings=settings),
        inputs=((*cut, whole, whole), of_cache, of_cache, (), ("batch",)),
        output=(*cut, whole, whole, whole),
    )
    q = q.reshape(batch, kv_heads, -1, dim).astype(precision.compute)
    found = run(q, keys, values, place, positions[:, 0])
    sinks = scoring.sink_scores(kv_heads=kv_heads, ndim=4, dtype=precision.accumulate)
    return joined(found, sinks, precision).reshape(batch, 1, heads, -1)


def attend_slots(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    place: jax.Array,
    positions: jax.Array,
    *,
    settings: Settings,
) -> jax.Array:
    """Averages values with softmax weights, without dividing by their sums.

    Args:
      q: [B, K, G, hd], the queries that share keys, in `compute`.
      keys: [L, B, K, S, hd], in the form of `to_bits`.
      values: [L, B, K, S, vd], in the same form.
      place: i32[], the layer.
      positions: i32[B], of the queries; slots after them, and before the window, are not read.
      settings: of the call.

    Returns:
      [B, K, P, G, vd + 2] in `accumulate`, for each of P parts of the slots: the sum of weighted
      values, the sum of the weights, and the score relative to which weights are.
    """
    from jax.experimental import pallas  # slow to import
    from jax.experimental.pallas import triton

    rows, kv_heads, slots, width = keys.shape[1:]
    block = max(_QUERIES, min(64, _BLOCK // (_power(width) * keys.dtype.itemsize)))
    parts = min(-(-_PROGRAMS // (rows * kv_heads)), max(1, slots // _FEWEST))
    own = -(-slots // (parts * block)) * block
    moved = rows * kv_heads * slots * (width + values.shape[-1]) * keys.dtype.itemsize
    kernel = functools.partial(_kernel, block=block, own=own, settings=settings)
    shape = (rows, kv_heads, parts, q.shape[2])

    def made(*more: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape, *more), settings.precision.accumulate)

    out, total, largest = pallas.pallas_call(
        kernel,
        out_shape=(made(values.shape[-1]), made(), made()),
        grid=(rows * kv_heads, parts),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        # XLA's text shows a whole cache as its operand.
        metadata={"bytes": str(moved)},
        interpret=settings.interpret,
    )(q, keys, values, place.reshape(1), positions)
    return jnp.concatenate([out, total[..., None], largest[..., None]], axis=-1)


def joined(found: jax.Array, sinks: jax.Array | None, precision: Precision) -> jax.Array:
    """Joins the parts that `attend_slots` returns: [B, K, G, vd] in `activations`. `sinks` as in
    `Scoring.sink_scores`."""
    out, total, largest = found[..., :-2], found[..., -2:-1], found[..., -1:]
    top = jnp.max(largest, axis=2, keepdims=True)
    if sinks is not None:
        sinks = sinks[:, :, None]
        top = jnp.maximum(top, sinks)
    factor = jnp.exp(largest - top)
    total = jnp.sum(total * factor, axis=2)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)[:, :, 0]
    return (jnp.sum(out * factor, axis=2) / total).astype(precision.activations)


def _power(number: int) -> int:
    return max(_QUERIES, 1 << (number - 1).bit_length())


def _kernel(q, keys, values, place, positions, out, total, largest, *, block, own, settings):
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    precision, scoring = settings.precision, settings.scoring
    number, part = pallas.program_id(0), pallas.program_id(1)
    row, head, layer = number // keys.shape[2], number % keys.shape[2], place[0]
    position = positions[row]
    first = 0 if scoring.window is None else jnp.maximum(0, position - scoring.window + 1)
    queries = jnp.arange(_QUERIES) < q.shape[2]

    def columns(array: Any) -> tuple[Any, jax.Array]:
        size = _power(array.shape[-1])
        return pallas.ds(0, size), jnp.arange(size)[None, :] < array.shape[-1]

    def held(array: Any, start: Any, seen: jax.Array) -> jax.Array:
        at, there = columns(array)
        at = array.at[layer, row, head, pallas.ds(start, block), at]
        return from_bits(triton.load(at, mask=seen[:, None] & there, other=0), precision.compute)

    at, there = columns(q)
    at = q.at[row, head, pallas.ds(0, _QUERIES), at]
    x = triton.load(at, mask=queries[:, None] & there, other=0)
    dot = functools.partial(triton.dot, precision=precision.algorithm)
    least = jnp.finfo(precision.accumulate).min

    def step(i, carry):
        so_far, weight, top = carry
        index = i * block + jnp.arange(block)
        seen = (index >= first) & (index <= position)
        scores = scoring.scores(dot(x, held(keys, i * block, seen), trans_b=True))
        scores = jnp.where(seen[None, :], scores, least)
        new = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.where(seen[None, :], jnp.exp(scores - new[:, None]), 0)
        factor = jnp.exp(top - new)
        more = dot(weights.astype(precision.compute), held(values, i * block, seen))
        so_far = so_far * factor[:, None] + more
        return so_far, weight * factor + jnp.sum(weights, axis=1), new

    at, there = columns(out)
    begin = (
        jnp.zeros((_QUERIES, at.size), precision.accumulate),
        jnp.zeros(_QUERIES, precision.accumulate),
        jnp.full(_QUERIES, least, precision.accumulate),
    )
    start = jnp.maximum(part * own, first) // block
    stop = jnp.minimum((part + 1) * own, position + 1)
    so_far, weight, top = lax.fori_loop(start, (stop + block - 1) // block, step, begin)
    place_of = (row, head, part, pallas.ds(0, _QUERIES))
    triton.store(out.at[(*place_of, at)], so_far, mask=queries[:, None] & there)
    triton.store(total.at[place_of], weight, mask=queries)
    triton.store(largest.at[place_of], top, mask=queries)
