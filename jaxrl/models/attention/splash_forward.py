"""Splash attention of rows that fit into a TPU's fast memory, by two Pallas kernels.

jax's kernel computes a block's scores, waits for them, and then adds the values; it writes each
log-sum-exp 128 times (docs/results/chips.md). Here the scores of the next block are computed while
the values of this one are added. The formulas are those of FlashAttention-2 (arXiv:2307.08691,
algorithm 1); `splash_gradient` has the other kernel.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.models.attention.scores import soft_cap
from jaxrl.models.attention.splash_blocks import (
    HIDDEN,
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
from jaxrl.models.attention.splash_gradient import gradients
from jaxrl.models.attention.tree import KEPT
from jaxrl.models.products import block_product, named

_NONE = -0.7 * float(jnp.finfo(jnp.float32).max)  # the score of a key that is not seen


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tokens: Tokens,
    sinks: jax.Array | None,
    settings: Settings,
) -> jax.Array:
    """Computes attention [H, B * T, vd], in the dtype of `q`.

    Args:
      q: [H, B * T, hd], rows one behind the other. Its products with keys are the scores.
      k: [K, B * S, hd]; H is a multiple of K.
      v: [K, B * S, vd].
      tokens: the rows'.
      sinks: f32[H], as in `Scoring`.
      settings: of the call.
    """
    return _outputs(q, k, v, tokens, sinks, settings)[0]


def _forward(q, k, v, tokens, sinks, settings):
    out, logsumexp = _outputs(q, k, v, tokens, sinks, settings)
    out, logsumexp = named(out, KEPT), named(logsumexp, KEPT)
    return out, (q, k, v, out, logsumexp, tokens, sinks)


def _backward(settings, saved, dout):
    q, k, v, out, logsumexp, tokens, sinks = saved
    di = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)[:, None]
    found = gradients(q, k, v, dout, logsumexp, di, tokens=tokens, settings=settings)
    if sinks is not None:
        share = jnp.exp(sinks.astype(jnp.float32)[:, None] - logsumexp[:, 0])
        sinks = -jnp.sum(share * di[:, 0], axis=1).astype(sinks.dtype)
    return *found, None, sinks


attention.defvjp(_forward, _backward)


# Of the calls that remat repeats, jax leaves out those of which nothing is used; a kernel's only if
# it is inside such a function.
@functools.partial(jax.jit, static_argnums=5)
def _outputs(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tokens: Tokens,
    sinks: jax.Array | None,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Computes attention and the log-sum-exp of the scores that a query sees, f32[H, 1, B * T]."""
    from jax.experimental import pallas
    from jax.experimental.pallas import tpu

    (batch, queries), keys = tokens.of_queries.shape, tokens.of_keys.shape[1]
    size, value_size = q.shape[-1], v.shape[-1]
    held = HeadBlocks(queries, keys, len(q) // len(k))
    starts = jnp.full(len(q), _NONE) if sinks is None else sinks
    listed, counts = _listed(tokens, settings)
    block = settings.block
    sums = [(value_size, block), (1, block), (1, block), (2, block, block), (2, block)]
    return pallas.pallas_call(
        functools.partial(_kernel, settings=settings),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(batch, len(k), held.group),
            in_specs=[
                held.of_queries(size),
                held.of_keys(size),
                held.of_keys(value_size),
                *held.sequences(),
            ],
            out_specs=[held.of_queries(value_size), held.numbers()],
            scratch_shapes=[tpu.VMEM(shape, jnp.float32) for shape in sums],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((*q.shape[:2], value_size), q.dtype),
            jax.ShapeDtypeStruct((len(q), 1, q.shape[1]), jnp.float32),
        ],
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=needed(queries, keys, size, value_size),
        ),
        name="splash_mha_forward",
        interpret=settings.interpret,
    )(
        tokens.first[None],
        listed.reshape(-1),
        counts,
        starts.astype(jnp.float32),
        *(q, k, v, *sequences(tokens)),
    )


def _listed(tokens: Tokens, settings: Settings) -> tuple[jax.Array, jax.Array]:
    """Lists the blocks of scores that count, by queries and then by keys: each one's number times
    4, plus its kind. Returns i32[B, blocks] and how many each row has, i32[B]."""
    kinds = pairs(tokens, settings).swapaxes(1, 2).reshape(len(tokens.of_queries), -1)
    codes = 4 * jnp.arange(kinds.shape[1], dtype=jnp.int32)[None] + kinds
    hidden = kinds == HIDDEN
    codes = jnp.sort(jnp.where(hidden, jnp.iinfo(jnp.int32).max, codes), axis=1)
    return codes, jnp.sum(~hidden, axis=1, dtype=jnp.int32)


def _kernel(first, listed, counts, starts, *refs, settings):
    """Computes one head of queries in one row. Scores lie with the keys first, [block of keys,
    block of queries], and sums with the values' dimensions first."""
    from jax.experimental import pallas

    q, k, v, of_queries, of_keys, out, logsumexp, total, largest, weights, scores, tops = refs
    block = settings.block
    blocks, row = (q.shape[0] // block, k.shape[0] // block), pallas.program_id(0)
    start = starts[pallas.program_id(1) * pallas.num_programs(2) + pallas.program_id(2)]

    def numbers(n):
        code = listed[row * blocks[0] * blocks[1] + n]
        number = lax.div(code, 4)
        return lax.div(number, blocks[1]), lax.rem(number, blocks[1]), lax.rem(code, 4)

    def begin():
        # A sink is a score of its own, which has no value.
        largest[...] = jnp.full(largest.shape, start)
        weights[...] = jnp.full(weights.shape, jnp.where(start > _NONE, 1.0, 0.0))
        total[...] = jnp.zeros_like(total)

    def score(n, at, masked):
        i, j, _ = numbers(n)
        products = block_product(k[within(j, block), :], q[within(i, block), :], contract=(1, 1))
        found = soft_cap(products, settings.cap)
        if masked:
            found = jnp.where(seen(i, j, first[0], of_queries, of_keys, settings), found, _NONE)
        scores[at] = found
        tops[at : at + 1, :] = jnp.max(found, axis=0, keepdims=True)

    def add(n, at):
        _, j, _ = numbers(n)
        # Queries that see no key yet add what the next block multiplies by 0.
        larger = jnp.maximum(largest[...], tops[at : at + 1, :])
        p, factor = jnp.exp(scores[at] - larger), jnp.exp(largest[...] - larger)
        weights[...] = weights[...] * factor + jnp.sum(p, axis=0, keepdims=True)
        values = v[within(j, block), :]
        more = block_product(values, p.astype(values.dtype), contract=(0, 0))
        total[...] = total[...] * factor + more
        largest[...] = larger

    def finish(i):
        found = total[...] / weights[...]
        out[within(i, block), :] = found.T.astype(out.dtype)
        logsumexp[:, within(i, block)] = largest[...] + jnp.log(weights[...])
        begin()

    def step(n, at):
        # After the last block this is that one once more, which is not added again.
        following = jnp.minimum(n + 1, counts[row] - 1)
        (i, _, _), (of_next, _, kind) = numbers(n), numbers(following)
        for masked in (True, False):

            @pallas.when(kind == (MASKED if masked else SEEN))
            def _(masked=masked):
                score(following, 1 - at, masked)
                add(n, at)

        @pallas.when((n + 1 == counts[row]) | (of_next != i))
        def _():
            finish(i)

    def two(n, _):
        step(2 * n, 0)

        @pallas.when(2 * n + 1 < counts[row])
        def _():
            step(2 * n + 1, 1)

    begin()
    score(0, 0, True)
    lax.fori_loop(0, lax.div(counts[row] + 1, 2), two, None)
