"""Gradients of splash attention by one Pallas kernel, which adds them in the TPU's fast memory.

jax's kernel for all gradients writes that of the queries once for each part of the keys, for XLA to
add, and takes one row (docs/results/chips.md). Here fast memory holds the queries, keys and values
of one head of a row, and their gradients in f32, so that each is read and written once. The
formulas are those of FlashAttention-2 (arXiv:2307.08691, algorithm 2).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.models.attention.scores import soft_cap, soft_cap_slope
from jaxrl.models.attention.tree import KEPT
from jaxrl.models.products import block_product, named

_LANES = 128  # of a TPU's vector unit
# Bytes of fast memory for the kernel, by chip.
_FAST = {"TPU v5 lite": 96, "TPU v5": 48, "TPU v6 lite": 96, "TPU7x": 48}
_HIDDEN, _MASKED, _SEEN = range(3)  # a pair of blocks: none, some or all of its scores count


class Settings(NamedTuple):
    """Static settings of one call."""

    block: int  # tokens of a block of queries and of keys
    window: int | None
    cap: float | None
    interpret: bool = False


class Tokens(NamedTuple):
    """The sequences of rows, and where the queries are in them."""

    of_queries: jax.Array  # i32[B, T]
    of_keys: jax.Array  # i32[B, S]
    first: jax.Array  # i32[], index of the first query among the keys


def fits(kind: str, *, queries: int, keys: int, head_dim: int, value_dim: int) -> bool:
    """Tells if one head of a row fits into the fast memory of this kind of device."""
    return _bytes(queries, keys, head_dim, value_dim) <= _FAST.get(kind, 0) * 2**20


def _bytes(queries: int, keys: int, head_dim: int, value_dim: int) -> int:
    """Counts what the kernel holds: blocks of 16 bits that are read or written, twice each, sums in
    f32, and numbers of sequences and rows of f32, which fill whole tiles."""
    of_queries = 8 * head_dim + 4 * value_dim + 4 * head_dim + 3 * 2 * 32
    of_keys = 8 * (head_dim + value_dim) + 4 * (head_dim + value_dim) + 2 * 4 * _LANES
    return queries * of_queries + keys * of_keys + 8 * 2**20  # the last: a block's scores


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def attention(
    kernel: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tokens: Tokens,
    sinks: jax.Array | None,
    settings: Settings,
) -> jax.Array:
    """Computes attention [H, B * T, vd] by splash's kernel, and its gradients by `gradients`, which
    has the shapes. `sinks` f32[H] are as in `Scoring`."""
    return kernel(q, k, v, segment_ids(tokens), sinks)


def _forward(kernel, q, k, v, tokens, sinks, settings):
    infos = (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info)
    kernel = type(kernel)(*infos, **kernel.kwargs | {"save_residuals": True})
    out, (logsumexp,) = kernel(q, k, v, segment_ids(tokens), sinks)
    out, logsumexp = named(out, KEPT), named(logsumexp, KEPT)
    return out, (q, k, v, out, logsumexp, tokens, sinks)


def _backward(settings, saved, dout):
    q, k, v, out, logsumexp, tokens, sinks = saved
    di = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    found = gradients(q, k, v, dout, logsumexp, di, tokens=tokens, settings=settings)
    if sinks is not None:
        share = jnp.exp(sinks.astype(jnp.float32)[:, None] - logsumexp)
        sinks = -jnp.sum(share * di, axis=1).astype(sinks.dtype)
    return None, *found, None, sinks


attention.defvjp(_forward, _backward)


def segment_ids(tokens: Tokens) -> Any:
    """Returns the sequences as splash's kernel takes them, all rows in one."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # slow to import

    return splash.SegmentIds(q=tokens.of_queries.reshape(-1), kv=tokens.of_keys.reshape(-1))


def gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    logsumexp: jax.Array,
    di: jax.Array,
    *,
    tokens: Tokens,
    settings: Settings,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the gradients of queries, keys and values, each in the dtype and shape of its array.

    Args:
      q: [H, B * T, hd], rows one behind the other. Its products with keys are the scores.
      k: [K, B * S, hd]; H is a multiple of K.
      v: [K, B * S, vd].
      dout: [H, B * T, vd], gradient of attention's output.
      logsumexp: f32[H, B * T], of the scores that a query sees.
      di: f32[H, B * T], sum of the products of attention's output and `dout`.
      tokens: the rows'.
      settings: of the call.
    """
    from jax.experimental import pallas
    from jax.experimental.pallas import tpu

    (batch, queries), keys = tokens.of_queries.shape, tokens.of_keys.shape[1]
    group = len(q) // len(k)

    def of_query_head(*shape: int) -> Any:
        return pallas.BlockSpec((None, *shape), lambda b, h, g, *_: (h * group + g, b, 0))

    def of_key_head(width: int) -> Any:
        return pallas.BlockSpec((None, keys, width), lambda b, h, g, *_: (h, b, 0))

    numbers = pallas.BlockSpec((None, 1, queries), lambda b, h, g, *_: (h * group + g, 0, b))
    size, value_size = q.shape[-1], v.shape[-1]
    in_specs = [
        of_query_head(queries, size),
        of_key_head(size),
        of_key_head(value_size),
        of_query_head(queries, value_size),
        numbers,
        numbers,
        pallas.BlockSpec((None, 1, queries), lambda b, h, g, *_: (b, 0, 0)),
        pallas.BlockSpec((None, keys, _LANES), lambda b, h, g, *_: (b, 0, 0)),
    ]
    wide = (*tokens.of_keys.shape, _LANES)
    sums = [(queries, size), (keys, size), (keys, value_size)]
    return pallas.pallas_call(
        functools.partial(_kernel, settings=settings),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, len(k), group),
            in_specs=in_specs,
            out_specs=[of_query_head(queries, size), of_key_head(size), of_key_head(value_size)],
            scratch_shapes=[tpu.VMEM(shape, jnp.float32) for shape in sums],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)],
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=_bytes(queries, keys, size, value_size),
        ),
        name="splash_mha_gradients",
        interpret=settings.interpret,
    )(
        tokens.first[None],
        _pairs(tokens, settings).reshape(-1),
        *(q, k, v, dout, logsumexp[:, None], di[:, None]),
        tokens.of_queries[:, None],
        jnp.broadcast_to(tokens.of_keys[:, :, None], wide),
    )


def _pairs(tokens: Tokens, settings: Settings) -> jax.Array:
    """Tells of each pair of blocks if its scores count: i32[B, blocks of keys, of queries]."""
    (low, high), (first, last) = (
        ranges(x, settings.block) for x in (tokens.of_queries, tokens.of_keys)
    )
    shared = (low[:, None] <= last[:, :, None]) & (first[:, :, None] <= high[:, None])
    one = (low[:, None] == last[:, :, None]) & (first[:, :, None] == high[:, None])
    i, j = jnp.arange(low.shape[1])[None, None], jnp.arange(first.shape[1])[None, :, None]
    # Index of a block's first query minus that of its first key.
    distance = tokens.first + (i - j) * settings.block
    within = settings.block - 1
    seen, whole = distance >= -within, distance >= within
    if settings.window is not None:
        seen &= distance - within < settings.window
        whole &= distance + within < settings.window
    return jnp.where(one & whole, _SEEN, jnp.where(shared & seen, _MASKED, _HIDDEN))


def ranges(segments: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first and last sequence of each block of rows i32[B, T]; padding, numbered 0,
    comes last."""
    numbers = jnp.where(segments == 0, jnp.iinfo(jnp.int32).max, segments)
    numbers = numbers.reshape(len(segments), -1, block)
    return jnp.min(numbers, axis=2), jnp.max(numbers, axis=2)


def _kernel(first, pairs, *refs, settings):
    """Adds the gradients of one head of queries in one row; those of keys and values over the heads
    that share them."""
    from jax.experimental import pallas

    q, k, _, _, _, _, _, _, dq, dk, dv, dq_sum, dk_sum, dv_sum = refs
    of_queries, of_keys = (len_ // settings.block for len_ in (q.shape[0], k.shape[0]))
    row, head, last = pallas.program_id(0), pallas.program_id(2), pallas.num_programs(2) - 1
    dq_sum[...] = jnp.zeros_like(dq_sum)

    @pallas.when(head == 0)
    def _():
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    def pair(n, _):
        j, i = lax.div(n, of_queries), lax.rem(n, of_queries)
        kind = pairs[row * of_queries * of_keys + n]
        for masked in (True, False):

            @pallas.when(kind == (_MASKED if masked else _SEEN))
            def _(masked=masked):
                _add(i, j, first[0], refs, masked=masked, settings=settings)

    lax.fori_loop(0, of_queries * of_keys, pair, None)
    dq[...] = dq_sum[...].astype(dq.dtype)

    @pallas.when(head == last)
    def _():
        dk[...] = dk_sum[...].astype(dk.dtype)
        dv[...] = dv_sum[...].astype(dv.dtype)


def _add(i, j, first, refs, *, masked, settings):
    """Adds the gradients of block `i` of the queries and block `j` of the keys. Scores lie with the
    keys first: [block of keys, block of queries]."""
    from jax.experimental import pallas

    block = settings.block
    q, k, v, dout, logsumexp, di, of_queries, of_keys, _, _, _, dq_sum, dk_sum, dv_sum = refs
    rows, columns = (pallas.ds(pallas.multiple_of(n * block, block), block) for n in (j, i))
    queries, keys, douts = q[columns, :], k[rows, :], dout[columns, :]

    scores = soft_cap(block_product(keys, queries, contract=(1, 1)), settings.cap)
    p = jnp.exp(scores - logsumexp[:, columns])
    if masked:
        shape = scores.shape
        distance = first + (i - j) * block
        distance += lax.broadcasted_iota(jnp.int32, shape, 1)
        distance -= lax.broadcasted_iota(jnp.int32, shape, 0)
        seen = (distance >= 0) & (of_keys[rows, :1] == of_queries[:, columns])
        if settings.window is not None:
            seen &= distance < settings.window
        p = jnp.where(seen, p, 0)
    dv_sum[rows, :] += block_product(p.astype(douts.dtype), douts, contract=(1, 0))
    slope = soft_cap_slope(scores, settings.cap)
    ds = (block_product(v[rows, :], douts, contract=(1, 1)) - di[:, columns]) * p * slope
    ds = ds.astype(douts.dtype)
    dk_sum[rows, :] += block_product(ds, queries, contract=(1, 0))
    dq_sum[columns, :] += block_product(ds, keys, contract=(0, 0))
