"""Causal attention within segments that keeps no [T, T] array for the backward pass."""

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl.core.precision import Precision
from jaxrl.models.products import transposed

# Checkpoint name of the results that a remat policy may keep, to avoid recomputing attention.
KEPT = "attention"

# Queries go in blocks, each against the keys up to its own end: that skips almost half of the
# scores, and only one block's scores exist at a time. The program grows with the number of blocks.
_MIN_BLOCK, _MAX_BLOCKS = 128, 8


class Part(NamedTuple):
    """Position of queries that are part of their rows; keys and values cover the whole rows."""

    first: jax.Array  # i32[], index of the first query in the row
    segments: jax.Array  # i32[B, S], segments of the whole rows


class Attend(Protocol):
    """Interface of attention in the decoder; see `attention`."""

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: jax.Array,
        *,
        window: jax.Array | None,
        precision: Precision,
    ) -> jax.Array:
        """Takes the arguments of `attention` and returns its result."""
        ...


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    *,
    window: jax.Array | None,
    precision: Precision,
    part: Part | None = None,
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
      v: like k.
      segments: i32[B, T], 0 for padding.
      window: i32[], number of tokens that a token attends to, including itself; None for all.
      precision: the dtype policy; scores and softmax are in `accumulate`.
      part: the part of their rows that the queries are; None for whole rows.

    Returns:
      [B, T, H, hd] in `precision.activations`.
    """
    batch, length, heads, dim = q.shape
    groups = heads // k.shape[2]
    q = q.reshape(batch, length, -1, groups, dim).transpose(0, 2, 3, 1, 4)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    window = jnp.int32(k.shape[2]) if window is None else window
    out = _attention(q, k, v, segments, window, part, precision)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, dim)


def _forward(q, k, v, segments, window, part, precision):
    q, k, v = (x.astype(precision.compute) for x in (q, k, v))
    outs, log_totals = [], []
    for start, stop, end in _blocks(q, k, part):
        block = {"start": start, "stop": stop, "end": end, "precision": precision}
        scores = _scores(q, k, segments, window, part, **block)
        largest = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - largest)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        weights = weights.astype(precision.compute)
        out = _dot("bkgts,bksd->bkgtd", weights, v[:, :, :end], precision=precision)
        outs.append((out / total).astype(precision.activations))
        log_totals.append(largest + jnp.log(total))
    out = checkpoint_name(jnp.concatenate(outs, axis=3), KEPT)
    log_total = checkpoint_name(jnp.concatenate(log_totals, axis=3), KEPT)
    return out, (q, k, v, out, log_total, segments, window, part)


def _backward(precision, residuals, dout):
    q, k, v, out, log_total, segments, window, part = residuals
    dot = functools.partial(_dot, precision=precision)
    mean = jnp.sum(
        dout.astype(precision.accumulate) * out.astype(precision.accumulate), axis=-1, keepdims=True
    )
    dout = dout.astype(precision.compute)
    dqs = []
    # Transposed, so that no product transposes an array of scores.
    dk, dv = (jnp.zeros(k.swapaxes(2, 3).shape, precision.accumulate) for _ in range(2))
    for start, stop, end in _blocks(q, k, part):
        rows, seen = (..., slice(start, stop), slice(None)), (..., slice(end))
        keys = (..., slice(end), slice(None))
        block = {"start": start, "stop": stop, "end": end, "precision": precision}
        scores = _scores(q, k, segments, window, part, **block)
        probs = jnp.exp(scores - log_total[rows])
        dprobs = dot("bkgtd,bksd->bkgts", dout[rows], v[keys])
        dscores = probs * (dprobs - mean[rows]) * q.shape[-1] ** -0.5
        probs, dscores = probs.astype(precision.compute), dscores.astype(precision.compute)
        dqs.append(dot("bkgts,bksd->bkgtd", dscores, k[keys]))
        dk = dk.at[seen].add(dot("bkdt,bkts->bkds", _columns(q[rows]), _flat(dscores)))
        dv = dv.at[seen].add(dot("bkdt,bkts->bkds", _columns(dout[rows]), _flat(probs)))
    grads = (jnp.concatenate(dqs, axis=3), dk.swapaxes(2, 3), dv.swapaxes(2, 3))
    return (*(x.astype(precision.activations) for x in grads), None, None, None)


_attention: Any = jax.custom_vjp(lambda *args: _forward(*args)[0], nondiff_argnums=(6,))
_attention.defvjp(_forward, _backward)


def _blocks(q: jax.Array, k: jax.Array, part: Part | None) -> list[tuple[int, int, int]]:
    """Lists (first query, end of queries, end of the keys visible to them) of each block."""
    length = q.shape[3]
    size = max(_MIN_BLOCK, -(-length // _MAX_BLOCKS))
    blocks = [(start, min(start + size, length)) for start in range(0, length, size)]
    # The start of a part is not known at compile time, so its blocks use all keys.
    return [(*block, block[1] if part is None else k.shape[2]) for block in blocks]


def _flat(x):
    """[B, K, G, T, N] -> [B, K, G * T, N]: one row for each query of a key's group."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _columns(x):
    return transposed(_flat(x))


def _dot(equation: str, x: jax.Array, y: jax.Array, *, precision: Precision) -> jax.Array:
    return jnp.einsum(equation, x, y, preferred_element_type=precision.accumulate)


def _scores(q, k, segments, window, part, *, start, stop, end, precision):
    """Computes scores of the queries in [start, stop) with the keys before `end`; the lowest finite
    number where a key is masked."""
    q, k = q[..., start:stop, :], k[..., :end, :]
    scores = _dot("bkgtd,bksd->bkgts", q, k, precision=precision) * q.shape[-1] ** -0.5
    first, of_keys = (0, segments) if part is None else part
    distance = first + jnp.arange(start, stop)[:, None] - jnp.arange(end)[None, :]
    causal = (distance >= 0) & (distance < window)
    seen = causal[None] & (segments[:, start:stop, None] == of_keys[:, None, :end])
    return jnp.where(seen[:, None, None], scores, jnp.finfo(scores.dtype).min)
