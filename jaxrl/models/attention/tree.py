"""Causal attention over sequences that share prefixes: each token attends to its ancestors.

The sequences of a row form a tree: a prefix that several begin with is written once, in front of
all of them (shared prefixes: arXiv:2506.05433; trees: arXiv:2511.00413). In this order the tokens
that see a key are consecutive, so the whole mask is one number per key (arXiv:2410.01359).

Scores are computed in square blocks, with the running sums of the softmax (arXiv:1805.02867,
2205.14135). A block that no query sees is skipped, so that the cost grows with the pairs of tokens
that see each other, not with the square of the row.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.core.precision import Precision
from jaxrl.models.attention.scores import Scoring
from jaxrl.models.attention.visible import Tree, in_tree
from jaxrl.models.products import named, product, transposed_product

# Checkpoint name of the results that a remat policy may keep, to avoid recomputing attention.
KEPT = "attention"

BLOCK = 128  # queries and keys of a block


class _Mask(NamedTuple):
    """Visibility of keys to queries. `order` and `count` list the visible blocks of keys."""

    tree: Tree  # of the keys, [B, S]
    positions: jax.Array  # i32[B, T], of the queries
    first: jax.Array  # i32[], index of the first query in the row
    scoring: Scoring
    order: jax.Array  # i32[T / BLOCK, S / BLOCK]
    count: jax.Array  # i32[T / BLOCK]


def tree_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tree: Tree,
    queries: tuple[jax.Array, jax.Array],
    *,
    scoring: Scoring,
    precision: Precision,
) -> jax.Array:
    """Computes `blocks.attention` in which token j of a row sees token i if
    i <= j < tree.seen_until[i]. A window counts tokens of the sequence.

    `tree` is the tree of the keys [B, S]. Every token sees itself, padding included. `queries` are
    their positions i32[B, T] and the index i32[] of the first one in the row.
    """
    batch, length, heads, dim = q.shape
    q = q.reshape(batch, length, k.shape[2], heads // k.shape[2], dim).transpose(0, 2, 3, 1, 4)
    sinks = scoring.sink_scores(kv_heads=k.shape[2], ndim=5, dtype=precision.accumulate)
    k, v = (pad(x.transpose(0, 2, 1, 3), BLOCK, axis=2) for x in (k, v))
    positions, first = pad(queries[0], BLOCK, axis=1), queries[1]
    # Nothing sees a padded key, and the results of padded queries are cut off.
    tree = Tree(*(pad(x, BLOCK, axis=1) for x in tree))
    blocks = _visible_blocks(tree.seen_until, first, queries=positions.shape[1] // BLOCK)
    mask = _Mask(tree, positions, first, dataclasses.replace(scoring, sinks=None), *blocks)
    out = _attention(pad(q, BLOCK, axis=3), k, v, sinks, mask, precision)[..., :length, :]
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, v.shape[-1])


def pad(x: jax.Array, unit: int, *, axis: int) -> jax.Array:
    """Appends zeros along an axis up to a multiple of `unit`."""
    more = -x.shape[axis] % unit
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)]) if more else x


def _visible_blocks(
    until: jax.Array, first: jax.Array, *, queries: int
) -> tuple[jax.Array, jax.Array]:
    """Lists the blocks of keys that each block of queries sees in any row, and their number."""
    # One list serves all rows of the batch, because the loop over it has one length.
    ends = jnp.max(until.reshape(len(until), -1, BLOCK), axis=(0, 2))
    keys = jnp.arange(len(ends), dtype=jnp.int32) * BLOCK
    start = first + jnp.arange(queries, dtype=jnp.int32)[:, None] * BLOCK
    seen = (keys[None] < start + BLOCK) & (ends[None] > start)
    # Stable: visible blocks keep their order, so that a query's sums are added in the same order
    # whichever blocks are skipped.
    order = jnp.argsort(~seen, axis=1, stable=True).astype(jnp.int32)
    return order, jnp.sum(seen, axis=1, dtype=jnp.int32)


def sink_gradient(
    sinks: jax.Array | None, *, log_total: jax.Array, mean: jax.Array
) -> jax.Array | None:
    """Computes the gradient of `Scoring.sink_scores`, in `accumulate`.

    A sink's share of the softmax multiplies no value, so its derivative is the negative share times
    the mean of the values' derivatives.

    Args:
      sinks: [1, K, G, 1, 1], or None.
      log_total: [B, K, G, T, 1], log of the softmax's denominator, with the sink.
      mean: [B, K, G, T, 1], product of attention's output and its gradient.
    """
    if sinks is None:
        return None
    return -jnp.sum(jnp.exp(sinks - log_total) * mean, axis=(0, 3, 4), keepdims=True)[:1]


def _forward(q, k, v, sinks, mask, precision):
    q, k, v = (x.astype(precision.compute) for x in (q, k, v))

    def of_queries(_, i):
        own = _block(q, i, axis=3)

        def of_keys(n, found):
            largest, total, out = found
            j = mask.order[i, n]
            scores = _scores(own, _block(k, j, axis=2), mask, (i, j), precision=precision)
            # A query may see no key of its first blocks. All their scores are then the lowest
            # number and their weights 1, but at the first key that it does see `shrink` is 0 and
            # removes them. Every query sees itself, so there is one. Scores of -inf would give NaN
            # instead.
            top = jnp.maximum(largest, jnp.max(scores, axis=-1, keepdims=True))
            weights, shrink = jnp.exp(scores - top), jnp.exp(largest - top)
            total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
            values = _block(v, j, axis=2)
            more = product(weights, values, contract=(4, 2), batch=(0, 1), precision=precision)
            return top, total, out * shrink + more

        wide = precision.accumulate
        column = jnp.zeros((*own.shape[:-1], 1), wide)
        sums = jnp.zeros((*own.shape[:-1], v.shape[-1]), wide)
        start = (column + jnp.finfo(wide).min, column, sums)
        if sinks is not None:
            # A sink is a key without a value: the sums begin with its weight, exp(sinks - sinks).
            start = (column + sinks, column + 1, sums)
        largest, total, out = lax.fori_loop(0, mask.count[i], of_keys, start)
        return None, ((out / total).astype(precision.activations), largest + jnp.log(total))

    _, found = lax.scan(of_queries, None, jnp.arange(len(mask.count)))
    out, log_total = (named(_joined(x), KEPT) for x in found)
    return out, (q, k, v, sinks, out, log_total, mask)


def _backward(precision, residuals, dout):
    q, k, v, sinks, out, log_total, mask = residuals
    wide, dot = precision.accumulate, functools.partial(product, batch=(0, 1), precision=precision)
    # It transposes the queries, so that no product transposes an array of scores.
    dot_t = functools.partial(transposed_product, batch=(0, 1), precision=precision)
    # The weighted mean of dprobs, without an array of scores; see `blocks`.
    mean = jnp.sum(dout.astype(wide) * out.astype(wide), axis=-1, keepdims=True)
    dout = dout.astype(precision.compute)

    def of_queries(grads, i):
        own, d_own, log_sum, mean_own = (_block(x, i, axis=3) for x in (q, dout, log_total, mean))

        def of_keys(n, grads):
            dq, dk, dv = grads
            j = mask.order[i, n]
            keys, values = (_block(x, j, axis=2) for x in (k, v))
            scores = _scores(own, keys, mask, (i, j), precision=precision)
            probs = jnp.exp(scores - log_sum)
            dprobs = dot(d_own, values, contract=(4, 3))
            slopes = mask.scoring.slopes(scores)
            dscores = probs * (dprobs - mean_own) * slopes
            probs, dscores = probs.astype(precision.compute), dscores.astype(precision.compute)
            dq = dq + dot(dscores, keys, contract=(4, 2))
            dk = _add(dk, j, dot_t(flat(own), flat(dscores)))
            dv = _add(dv, j, dot_t(flat(d_own), flat(probs)))
            return dq, dk, dv

        # Query blocks are the outer loop: dq is finished within one step, dk and dv are carried.
        start = (jnp.zeros(own.shape, wide), *grads)
        dq, *grads = lax.fori_loop(0, mask.count[i], of_keys, start)
        return tuple(grads), dq

    grads = tuple(
        # The number of the key block is the first axis, so that adding to a block updates one
        # contiguous part of the carry.
        jnp.zeros((x.shape[2] // BLOCK, *x.shape[:2], x.shape[3], BLOCK), wide)
        for x in (k, v)
    )
    (dk, dv), dq = lax.scan(of_queries, grads, jnp.arange(len(mask.count)))
    dk, dv = (dx.transpose(1, 2, 0, 4, 3).reshape(x.shape) for dx, x in ((dk, k), (dv, v)))
    dsinks = sink_gradient(sinks, log_total=log_total, mean=mean)
    return (*(x.astype(precision.activations) for x in (_joined(dq), dk, dv)), dsinks, None)


# JAX cannot differentiate a loop whose length is known only at run time.
_attention: Any = jax.custom_vjp(lambda *args: _forward(*args)[0], nondiff_argnums=(5,))
_attention.defvjp(_forward, _backward)


def _block(x: jax.Array, i: jax.Array, *, axis: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, i * BLOCK, BLOCK, axis=axis)


def _add(blocks: jax.Array, j: jax.Array, more: jax.Array) -> jax.Array:
    """Adds to block j."""
    sums = lax.dynamic_index_in_dim(blocks, j, keepdims=False) + more
    return lax.dynamic_update_index_in_dim(blocks, sums, j, axis=0)


def _joined(blocks: jax.Array) -> jax.Array:
    """Joins blocks of queries: [N, B, K, G, BLOCK, x] -> [B, K, G, N * BLOCK, x]."""
    blocks = jnp.moveaxis(blocks, 0, 3)
    return blocks.reshape(*blocks.shape[:3], -1, blocks.shape[-1])


def flat(x: jax.Array) -> jax.Array:
    """Joins the queries of a key's group: [B, K, G, T, N] -> [B, K, G * T, N]."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _scores(q, k, mask: _Mask, block: tuple[jax.Array, jax.Array], *, precision):
    """Computes the scores of a block of queries with a block of keys; the lowest finite number
    where a key is masked."""
    i, j = block
    products = product(q, k, contract=(4, 3), batch=(0, 1), precision=precision)
    scores = mask.scoring.scores(products)
    at = jnp.arange(BLOCK)
    seen = in_tree(
        Tree(*(_block(x, j, axis=1) for x in mask.tree)),
        j * BLOCK + at,
        _block(mask.positions, i, axis=1),
        mask.first + i * BLOCK + at,
        window=mask.scoring.window,
    )
    return jnp.where(seen[:, None, None], scores, jnp.finfo(scores.dtype).min)
