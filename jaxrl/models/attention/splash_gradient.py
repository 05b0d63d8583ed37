"""Gradients of splash attention by one Pallas kernel, which adds them in the TPU's fast memory.

jax's kernel for all gradients writes that of the queries once for each part of the keys, for XLA to
add, and takes one row (docs/results/chips.md). Here fast memory holds the queries, keys and values
of one head of a row, and their gradients in f32, so that each is read and written once. The
formulas are those of FlashAttention-2 (arXiv:2307.08691, algorithm 2).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.models.attention.scores import soft_cap, soft_cap_slope
from jaxrl.models.attention.splash_blocks import (
    MASKED,
    SEEN,
    HeadBlocks,
    Settings,
    Tokens,
    needed,
    pairs,
    seen,
    sequences,
    within,
)
from jaxrl.models.products import block_product


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
      logsumexp: f32[H, 1, B * T], of the scores that a query sees.
      di: f32[H, 1, B * T], sum of the products of attention's output and `dout`.
      tokens: the rows'.
      settings: of the call.
    """
    from jax.experimental import pallas
    from jax.experimental.pallas import tpu

    (batch, queries), keys = tokens.of_queries.shape, tokens.of_keys.shape[1]
    size, value_size = q.shape[-1], v.shape[-1]
    held = HeadBlocks(queries, keys, len(q) // len(k))
    in_specs = [
        held.of_queries(size),
        held.of_keys(size),
        held.of_keys(value_size),
        held.of_queries(value_size),
        *(held.numbers(), held.numbers()),
        *held.sequences(),
    ]
    sums = [(queries, size), (keys, size), (keys, value_size)]
    return pallas.pallas_call(
        functools.partial(_kernel, settings=settings),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, len(k), held.group),
            in_specs=in_specs,
            out_specs=[held.of_queries(size), held.of_keys(size), held.of_keys(value_size)],
            scratch_shapes=[tpu.VMEM(shape, jnp.float32) for shape in sums],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)],
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=needed(queries, keys, size, value_size),
        ),
        name="splash_mha_gradients",
        interpret=settings.interpret,
    )(
        tokens.first[None],
        pairs(tokens, settings).reshape(-1),
        *(q, k, v, dout, logsumexp, di, *sequences(tokens)),
    )


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

            @pallas.when(kind == (MASKED if masked else SEEN))
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
    block = settings.block
    q, k, v, dout, logsumexp, di, of_queries, of_keys, _, _, _, dq_sum, dk_sum, dv_sum = refs
    rows, columns = (within(n, block) for n in (j, i))
    queries, keys, douts = q[columns, :], k[rows, :], dout[columns, :]

    scores = soft_cap(block_product(keys, queries, contract=(1, 1)), settings.cap)
    p = jnp.exp(scores - logsumexp[:, columns])
    if masked:
        p = jnp.where(seen(i, j, first, of_queries, of_keys, settings), p, 0)
    dv_sum[rows, :] += block_product(p.astype(douts.dtype), douts, contract=(1, 0))
    slope = soft_cap_slope(scores, settings.cap)
    ds = (block_product(v[rows, :], douts, contract=(1, 1)) - di[:, columns]) * p * slope
    ds = ds.astype(douts.dtype)
    dk_sum[rows, :] += block_product(ds, queries, contract=(1, 0))
    dq_sum[columns, :] += block_product(ds, keys, contract=(0, 0))
