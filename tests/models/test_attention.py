"""Attention in blocks equals a softmax over the whole masked score matrix, gradients too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core import precision
from jaxrl.models.attention.blocks import attention
from jaxrl.models.attention.scores import Scoring

F64 = precision.parse("fp32,compute=f64,activations=f64,logits=f64")


def naive(q, k, v, segments, window, *, scale, cap, sinks):
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * (scale or q.shape[-1] ** -0.5)
    scores = scores if cap is None else cap * jnp.tanh(scores / cap)
    index = np.arange(q.shape[1])
    distance = index[:, None] - index[None, :]
    seen = (distance >= 0) & (distance < window)
    seen = seen[None] & (segments[:, :, None] == segments[:, None, :])
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    if sinks is None:
        probs = jax.nn.softmax(scores, axis=-1)
    else:
        column = jnp.broadcast_to(sinks.reshape(1, -1, 1, 1), (*scores.shape[:-1], 1))
        probs = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bhts,bshd->bthd", probs, v)


@pytest.mark.parametrize("length", [7, 128, 300])  # one block; exactly one; three, the last short
@pytest.mark.parametrize(
    ("window", "scale", "cap", "sunk"),
    [
        (None, 0.5, None, False),
        (20, 0.5, None, False),
        (20, 0.7, 1.5, False),
        (20, 0.5, None, True),
    ],
)
def test_equals_the_naive_form(length, window, scale, cap, sunk):
    rng = np.random.default_rng(length)
    segments = np.sort(rng.integers(0, 3, (2, length)), axis=1)  # padding on the left is a segment
    with jax.enable_x64(True):
        q, k, v, dout = (
            jnp.asarray(rng.normal(size=(2, length, heads, size)))
            for heads, size in ((4, 4), (2, 4), (2, 6), (4, 6))
        )

        sinks = jnp.asarray(rng.normal(size=4))

        def blocked(q, k, v, sinks):
            scoring = Scoring(window, scale, cap, sinks if sunk else None)
            return attention(q, k, v, jnp.asarray(segments), scoring=scoring, precision=F64)

        def whole(q, k, v, sinks):
            settings = {"scale": scale, "cap": cap, "sinks": sinks if sunk else None}
            return naive(q, k, v, segments, window or length, **settings)

        @jax.jit
        def both(q, k, v, sinks, dout):
            results = []
            for function in (blocked, whole):
                out, backward = jax.vjp(function, q, k, v, sinks)
                results.append((out, *backward(dout)))
            return results

        got, expected = both(q, k, v, sinks, dout)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_padding_is_finite_and_reaches_nothing():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 12, n, 4)), jnp.float32) for n in (2, 1, 1))
    segments = jnp.asarray([[0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0]])
    real = segments[:, :, None, None] > 0
    fp32 = precision.PRESETS["fp32"]

    def total(q, k, v):
        out = attention(q, k, v, segments, scoring=Scoring(None, 0.5), precision=fp32)
        return jnp.sum(jnp.where(real, out, 0) ** 2), out

    gradient = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))
    (_, out), grads = jax.device_get(gradient(q, k, v))
    assert np.isfinite(out).all()
    for grad in grads:
        assert np.isfinite(grad).all()
        assert not np.where(real, 0, grad).any()
