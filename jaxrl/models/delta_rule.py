"""The gated delta rule (arXiv:2412.06464): linear attention with a state that forgets and corrects.

The state S [dk, dv] of a head becomes exp(g) S + k (beta (v - exp(g) S' k))' with each token, and
the token's result is S' q. Training and prefill compute chunks of tokens by matrix products
(arXiv:2406.06484), decoding one token per step. With fixed sums all of them take one token after
the other, and chunks compute the gradient alone. Everything is in `accumulate`, even the operands
of products: a state keeps its errors, and chunks and single tokens round in different places.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl.core.precision import Precision
from jaxrl.models.products import Form, batched_matmul, product

CHUNK = 64  # tokens computed at once, a power of two
_EPS = 1e-6  # of the norms of queries and keys


class Gates(NamedTuple):
    """Gates of tokens, [B, T, H] in `accumulate`."""

    decay: jax.Array  # log of the factor of the state, at most 0
    beta: jax.Array  # share of the value that is written, 0 to 1


def causal_convolution(
    x: jax.Array, weight: jax.Array, segments: jax.Array, *, precision: Precision
) -> jax.Array:
    """Applies a causal convolution to each channel, then silu: [B, T, C] -> [B, T, C], in
    `precision.activations`.

    `weight` [C, W] is for the last W tokens; the token itself comes last. Earlier tokens of another
    segment i32[B, T] count as zeros. The sum is in `accumulate`.
    """
    parts = [x]
    for back in range(1, weight.shape[-1]):
        before = jnp.pad(segments, ((0, 0), (back, 0)), constant_values=-1)[:, :-back]
        shifted = jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, :-back]
        parts.append(jnp.where((before == segments)[..., None], shifted, 0))
    return _weighted(parts[::-1], weight, precision=precision)


def convolution_step(window: jax.Array, weight: jax.Array, *, precision: Precision) -> jax.Array:
    """Computes `causal_convolution` of one token: its last W inputs [B, W, C] -> [B, 1, C]."""
    parts = [window[:, i : i + 1] for i in range(window.shape[1])]
    return _weighted(parts, weight, precision=precision)


def _weighted(parts: list[jax.Array], weight: jax.Array, *, precision: Precision) -> jax.Array:
    kernel = weight.astype(precision.accumulate)
    terms = (
        x.astype(precision.accumulate) * kernel[:, i].reshape(1, 1, -1) for i, x in enumerate(parts)
    )
    total = sum(terms, start=jnp.zeros((), precision.accumulate))
    return jax.nn.silu(total).astype(precision.activations)


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Gates,
    segments: jax.Array,
    *,
    precision: Precision,
) -> tuple[jax.Array, jax.Array]:
    """Computes the gated delta rule of rows of segments, each from a state of zeros.

    Args:
      q: [B, T, K, dk], normalised here and divided by sqrt(dk).
      k: like q, normalised here.
      v: [B, T, H, dv], H a multiple of K; head h reads keys of head h // (H / K).
      gates: of the H heads.
      segments: i32[B, T], 0 for padding. The tokens of a segment follow each other.
      precision: the dtype policy.

    Returns:
      [B, T, H, dv] in `precision.activations`; and the states [B, H, dk, dv] in `accumulate` after
      the last segment of each row. Padding does not change states.
    """
    real = segments > 0
    starts = real & (segments != jnp.pad(segments, ((0, 0), (1, 0)))[:, :-1])
    numbers = jnp.cumsum(starts, axis=1)  # padding has the number of the segment before it
    decay = jnp.where((real & ~starts)[..., None], gates.decay, 0)  # a first token has no state
    beta = jnp.where(real[..., None], gates.beta, 0)
    if precision.sums == "fixed":
        run = _by_token
    else:
        run = jax.checkpoint(_chunks, static_argnums=(6,), prevent_cse=False)
    out, states = run(*_heads(q, k, v, precision), decay, beta, numbers, _wide(precision))
    return out.astype(precision.activations), states


def _wide(precision: Precision) -> Precision:
    """Returns the dtype policy with operands of products in `accumulate`."""
    return dataclasses.replace(precision, compute=precision.accumulate)


def _heads(q, k, v, precision):
    """Normalises queries and keys, and repeats them for the heads of values."""
    copies = v.shape[-2] // k.shape[-2]
    q = _normalised(q, precision) * q.shape[-1] ** -0.5
    q, k = (jnp.repeat(x, copies, axis=-2) for x in (q, _normalised(k, precision)))
    return q, k, v.astype(precision.accumulate)


def _normalised(x: jax.Array, precision: Precision) -> jax.Array:
    wide = x.astype(precision.accumulate)
    return wide * lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + _EPS)


class _Chunk(NamedTuple):
    """Inputs of one step of the scan over chunks, [B, H, C, ...]."""

    values: jax.Array  # [dv], written if the state were zeros
    corrections: jax.Array  # [dk], which read the state to correct the values
    queries: jax.Array  # [dk], which read the state
    scores: jax.Array  # [C], products of queries with keys of the chunk
    keys: jax.Array  # [dk], as they are written to the state
    kept: jax.Array  # [B, H, 1, 1], factor of the state


def _chunks(q, k, v, decay, beta, numbers, precision):
    """Computes `delta_rule` of normalised heads; the backward pass recomputes it."""
    batch, length, heads, _ = v.shape
    more = -length % CHUNK

    def cut(x: jax.Array, mode: Literal["constant", "edge"] = "constant") -> jax.Array:
        """Divides [B, T, H, ...] into N chunks: [N, B, H, C, ...]."""
        x = jnp.pad(x, [(0, more * (i == 1)) for i in range(x.ndim)], mode=mode)
        x = x.reshape(batch, -1, CHUNK, *x.shape[2:])
        return x.transpose(1, 0, 3, 2, *range(4, x.ndim))

    numbers = cut(numbers[..., None], "edge")
    q, k, v, decay, beta = map(cut, (q, k, v, decay, beta))
    total = jnp.cumsum(decay, axis=-1)
    # Segments of the state after and before each chunk.
    last = numbers[..., -1:]
    before = jnp.concatenate([jnp.zeros_like(last[:1]), last[:-1]])
    read = jnp.where(numbers == before, jnp.exp(total), 0)
    written = jnp.where(numbers == last, jnp.exp(total[..., -1:] - total), 0)
    kept = jnp.where(before == last, jnp.exp(total[..., -1:]), 0)
    causal = np.tri(CHUNK, dtype=bool).reshape((1,) * 3 + (CHUNK, CHUNK))
    diagonal = np.eye(CHUNK, dtype=bool).reshape(causal.shape)
    seen = causal & (numbers[..., :, None] == numbers[..., None, :])
    distance = jnp.where(seen, total[..., :, None] - total[..., None, :], 0)
    factors = jnp.where(seen, jnp.exp(distance), 0)

    def dot(x: jax.Array, y: jax.Array, form: Form = "nn") -> jax.Array:
        return batched_matmul(x, y, form=form, precision=precision)

    weighted = k * beta[..., None]
    system = dot(weighted, k, "nt") * factors
    inverse = _unit_inverse(jnp.where(diagonal, 0, system), precision)
    chunks = _Chunk(
        values=dot(inverse, v * beta[..., None]),
        corrections=dot(inverse, weighted * read[..., None]),
        queries=q * read[..., None],
        scores=dot(q, k, "nt") * factors,
        keys=k * written[..., None],
        kept=kept[..., None],
    )

    def step(state, chunk):
        values = chunk.values - dot(chunk.corrections, state)
        out = dot(chunk.queries, state) + dot(chunk.scores, values)
        return state * chunk.kept + dot(chunk.keys, values, "tn"), out

    state = jnp.zeros((batch, heads, k.shape[-1], v.shape[-1]), precision.accumulate)
    state, out = lax.scan(step, state, chunks)
    out = out.transpose(1, 0, 3, 2, 4).reshape(batch, -1, heads, v.shape[-1])[:, :length]
    return out, state


def _by_token_forward(q, k, v, decay, beta, numbers, precision):
    """Computes `_chunks` token by token, with the arithmetic of `delta_step`."""
    batch, _, heads, width = v.shape
    before = jnp.pad(numbers, ((0, 0), (1, 0)))[:, :-1]
    factor = jnp.where((numbers == before)[..., None], jnp.exp(decay), 0)

    def step(state, token):
        q, k, v, factor, beta = token
        out, state = _token(q, k, v, factor, beta, state, precision)
        return state, out

    # [T, B, H, 1, ...]
    tokens = [jnp.moveaxis(x, 1, 0)[..., None, :] for x in (q, k, v)]
    tokens += [jnp.moveaxis(x, 1, 0)[..., None, None] for x in (factor, beta)]
    state = jnp.zeros((batch, heads, k.shape[-1], width), precision.accumulate)
    state, out = lax.scan(step, state, tokens)
    return (jnp.moveaxis(out[..., 0, :], 0, 1), state), (q, k, v, decay, beta, numbers)


def _by_token_backward(precision, inputs, gradients):
    *differentiable, numbers = inputs
    run = functools.partial(_chunks, numbers=numbers, precision=precision)
    return *jax.vjp(run, *differentiable)[1](gradients), None


# A gradient needs no fixed order, and chunks keep few states for it.
_by_token: Any = jax.custom_vjp(lambda *x: _by_token_forward(*x)[0], nondiff_argnums=(6,))
_by_token.defvjp(_by_token_forward, _by_token_backward)


def _token(q, k, v, factor, beta, state, precision):
    """Computes one token [B, H, 1, ...] of each head from its state, whose factor is [B, H, 1, 1].
    Returns the result and the new state."""
    dot: Any = functools.partial(product, contract=(3, 2), batch=(0, 1), precision=precision)
    state = state * factor
    change = (v - dot(k, state)) * beta
    state = state + k.swapaxes(2, 3) * change
    return dot(q, state), state


def _invert(lower: jax.Array, precision: Precision) -> jax.Array:
    """Inverts the identity plus a strictly lower triangular matrix [..., C, C], block by block.
    Powers of the matrix would take fewer products, but cancel where keys are alike."""
    *shape, size, _ = lower.shape
    found = jnp.ones((*shape, size, 1, 1), lower.dtype)  # inverses of the blocks of the diagonal
    width = 1
    while width < size:
        blocks = lower.reshape(*shape, size // (2 * width), 2 * width, -1, 2 * width)
        blocks = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
        first, second = found[..., ::2, :, :], found[..., 1::2, :, :]
        corner = batched_matmul(second, blocks[..., width:, :width], precision=precision)
        corner = -batched_matmul(corner, first, precision=precision)
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        below = jnp.concatenate([corner, second], axis=-1)
        found, width = jnp.concatenate([above, below], axis=-2), 2 * width
    return found[..., 0, :, :]


def _invert_forward(lower, precision):
    inverse = _invert(lower, precision)
    return inverse, inverse


def _invert_backward(precision, inverse, dinverse):
    left = batched_matmul(inverse, dinverse, form="tn", precision=precision)
    return (-batched_matmul(left, inverse, form="nt", precision=precision),)


_unit_inverse: Any = jax.custom_vjp(_invert, nondiff_argnums=(1,))
_unit_inverse.defvjp(_invert_forward, _invert_backward)


def delta_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Gates,
    state: jax.Array,
    *,
    precision: Precision,
) -> tuple[jax.Array, jax.Array]:
    """Computes `delta_rule` for one more token per row: [B, 1, ...] and the states [B, H, dk, dv]
    -> ([B, 1, H, dv] in `activations`, the new states)."""
    q, k, v = (x.swapaxes(1, 2) for x in _heads(q, k, v, precision))
    decay, beta = (x.swapaxes(1, 2)[..., None] for x in gates)
    out, state = _token(q, k, v, jnp.exp(decay), beta, state, _wide(precision))
    return out.swapaxes(1, 2).astype(precision.activations), state
