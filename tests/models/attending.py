"""Rows of attention and its gradients, which every kernel computes alike."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core.precision import PRESETS as PRECISIONS
from jaxrl.models.attention.blocks import attention
from jaxrl.models.attention.scores import Scoring
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS

FP32 = PRECISIONS["fp32"]
SINKS = jnp.asarray([-1.0, 0.5, 2.0, 0.0])
SCALE = 0.3  # of the scores, other than head_dim ** -0.5


def layout(**sizes) -> Layout:
    devices = jax.devices()[: math.prod(sizes.values())]
    return Layout(make_mesh(**sizes, devices=devices), PRESETS["all"])


@functools.cache
def inputs(length: int, head_dim: int, value_dim: int, rows: int):
    """Several sequences and padding in each row; 4 query heads, 2 key heads."""
    rng = np.random.default_rng(length)
    shapes = [(4, head_dim), (2, head_dim), (2, value_dim), (4, value_dim)]
    shapes = [(2, length, *shape) for shape in shapes]
    arrays = [jnp.asarray(rng.normal(size=shape)[:rows], jnp.float32) for shape in shapes]
    segments = np.sort(rng.integers(1, 4, (2, length)), axis=1)
    segments[:, -length // 8 :] = 0
    return arrays, jnp.asarray(segments[:rows], jnp.int32)


def results(attend, length: int, head_dim: int, *, window=None, cap=None, **more):
    """Output and gradients; what padding sees is nobody's business."""
    sizes = (more.get("value_dim", head_dim), more.get("rows", 2))
    (q, k, v, dout), segments = inputs(length, head_dim, *sizes)
    segments = more.get("segments", segments)
    real = (segments > 0)[:, :, None, None]

    @jax.jit
    def both(q, k, v, sinks):
        def call(q, k, v, sinks):
            scoring = Scoring(window, SCALE, cap, sinks)
            out = attend(q, k, v, segments, scoring=scoring, precision=FP32)
            return jnp.where(real, out, 0)

        out, backward = jax.vjp(call, q, k, v, sinks)
        return out, backward(dout)

    return jax.device_get(both(q, k, v, more.get("sinks")))


@functools.cache
def expected(length: int, head_dim: int):
    return results(attention, length, head_dim)


def assert_equal(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max(), rtol=1e-5)
