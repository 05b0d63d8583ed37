"""Causal attention within segments that keeps no [T, T] array for the backward pass."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxrl.precision import Precision

# Names the results that a remat policy may keep so that attention is not run again.
KEPT = "attention"


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    *,
    window: jax.Array | None,
    precision: Precision,
) -> jax.Array:
    """Grouped-query attention of whole sequences (arXiv:1706.03762, 2305.13245).

    A token sees the tokens of its own segment up to itself, by their index in the row. Padding is a
    segment like any other: it sees padding only, so that every row of the softmax has an entry
    and nothing of it reaches a real token. The backward pass recomputes the probabilities from q, k
    and the log of the softmax's denominator (arXiv:2205.14135).

    Args:
      q: [B, T, H, hd].
      k: [B, T, K, hd], H a multiple of K; query head h reads key head h // (H / K).
      v: like k.
      segments: i32[B, T], 0 for padding.
      window: i32[], how many tokens a token sees, itself included; None for all.
      precision: the dtype policy; scores and softmax are in `accumulate`.

    Returns:
      [B, T, H, hd] in `precision.activations`.
    """
    batch, length, heads, dim = q.shape
    groups = heads // k.shape[2]
    q = q.reshape(batch, length, -1, groups, dim).transpose(0, 2, 3, 1, 4)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    window = jnp.int32(length) if window is None else window
    out = _attention(q, k, v, segments, window, precision)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, dim)


def _forward(q, k, v, segments, window, precision):
    q, k, v = (x.astype(precision.compute) for x in (q, k, v))
    scores = _scores(q, k, segments, window, precision)
    log_total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    probs = jnp.exp(scores - log_total).astype(precision.compute)
    out = _dot("bkgts,bksd->bkgtd", probs, v, precision=precision)
    out = checkpoint_name(out.astype(precision.activations), KEPT)
    log_total = checkpoint_name(log_total, KEPT)
    return out, (q, k, v, out, log_total, segments, window)


def _backward(precision, residuals, dout):
    q, k, v, out, log_total, segments, window = residuals
    dot = functools.partial(_dot, precision=precision)
    wide = dout.astype(precision.accumulate)
    dout = dout.astype(precision.compute)
    probs = jnp.exp(_scores(q, k, segments, window, precision) - log_total)
    dprobs = dot("bkgtd,bksd->bkgts", dout, v)
    mean = jnp.sum(wide * out.astype(precision.accumulate), axis=-1, keepdims=True)
    dscores = probs * (dprobs - mean) * q.shape[-1] ** -0.5
    probs, dscores = probs.astype(precision.compute), dscores.astype(precision.compute)
    dq = dot("bkgts,bksd->bkgtd", dscores, k)
    dk = dot("bkgts,bkgtd->bksd", dscores, q)
    dv = dot("bkgts,bkgtd->bksd", probs, dout)
    dq, dk, dv = (x.astype(precision.activations) for x in (dq, dk, dv))
    return dq, dk, dv, None, None


_attention: Any = jax.custom_vjp(lambda *args: _forward(*args)[0], nondiff_argnums=(5,))
_attention.defvjp(_forward, _backward)


def _dot(equation: str, x: jax.Array, y: jax.Array, *, precision: Precision) -> jax.Array:
    return jnp.einsum(equation, x, y, preferred_element_type=precision.accumulate)


def _scores(q, k, segments, window, precision):
    scores = _dot("bkgtd,bksd->bkgts", q, k, precision=precision) * q.shape[-1] ** -0.5
    index = lax.iota(jnp.int32, k.shape[2])
    distance = index[:, None] - index[None, :]
    causal = (distance >= 0) & (distance < window)
    seen = causal & (segments[:, :, None] == segments[:, None, :])
    return jnp.where(seen[:, None, None], scores, jnp.finfo(scores.dtype).min)
