"""Attention over shared prefixes equals attention over each sequence alone, gradients too."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core import precision
from jaxrl.core.packing import SHARED, pack
from jaxrl.models.attention import cudnn, kernels
from jaxrl.models.attention.blocks import attention
from jaxrl.models.attention.scores import Scoring
from jaxrl.models.attention.visible import Tree, in_tree
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS
from tests.core.test_prefixes import behind

F64 = precision.parse("fp32,compute=f64,activations=f64,logits=f64")
LENGTH = 448


@functools.cache
def rows() -> tuple[Tree, jax.Array]:
    """Two rows of several groups of different shapes; the last blocks of one are all padding."""
    prompts = [np.arange(length) for length in (150, 40)]
    samples = [
        behind(prompts[n % 2], size, seed=n) for n, size in enumerate((30, 90, 50, 7, 20, 40, 3))
    ]
    batch = pack(
        samples, [0.0] * 7, rows=[[1, 3, 5, 0, 2, 4], [6]], row_length=LENGTH, align=SHARED
    )
    assert batch.seen_until is not None
    return Tree(jnp.asarray(batch.seen_until), jnp.asarray(batch.positions)), batch.segments > 0


def results(attend, scoring, *, width=8):
    """Output and gradients of the real tokens."""
    tree, real = rows()
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        q, k, v, dout = (
            jnp.asarray(rng.normal(size=(2, LENGTH, heads, size)))
            for heads, size in ((4, 8), (2, 8), (2, width), (4, width))
        )

        sinks = None if scoring.sinks is None else scoring.sinks.astype(jnp.float64)

        @jax.jit
        def both(q, k, v, sinks):
            def of_real(q, k, v, sinks):
                own = scoring.replace(sinks=sinks)
                out = attend(q, k, v, tree, scoring=own, precision=F64)
                return jnp.where(jnp.asarray(real)[:, :, None, None], out, 0)

            out, backward = jax.vjp(of_real, q, k, v, sinks)
            return jax.tree.leaves((out, backward(dout)))

        return jax.device_get(both(q, k, v, sinks))


def naive(q, k, v, tree, *, scoring, precision):
    del precision
    index, groups = jnp.arange(LENGTH), q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * scoring.scale
    scores = scores if scoring.cap is None else scoring.cap * jnp.tanh(scores / scoring.cap)
    seen = in_tree(tree, index, tree.positions, index, window=scoring.window)
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    sinks = jnp.full(4, -jnp.inf) if scoring.sinks is None else scoring.sinks
    column = jnp.broadcast_to(sinks.reshape(1, -1, 1, 1), (*scores.shape[:-1], 1))
    probs = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bhts,bshd->bthd", probs, v)


SCORINGS = {
    "plain": Scoring(None, 8**-0.5),
    "window": Scoring(20, 8**-0.5),
    "cap": Scoring(20, 0.7, 1.5),
    "sinks": Scoring(20, 0.7, 1.5, jnp.array([0.5, -1.0, 2.0, 0.0])),
}

WIDTHS = {"window": 6}  # of values, where it is not that of keys


@functools.cache
def expected(name="plain"):
    return results(naive, SCORINGS[name], width=WIDTHS.get(name, 8))


def assert_equal(found, wanted, *, within=1e-12):
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=within * np.abs(b).max())


@pytest.mark.parametrize("name", SCORINGS)
def test_equals_the_naive_form(name):
    found = results(attention, SCORINGS[name], width=WIDTHS.get(name, 8))
    assert_equal(found, expected(name))


@pytest.mark.parametrize(
    "sizes",
    [
        {"context": 8},
        {"data": 2, "context": 2, "tensor": 2},
        {"data": 2, "tensor": 2},
        {"data": 2, "tensor": 4},  # heads do not divide
    ],
)
def test_sharding_changes_nothing(sizes):
    devices = jax.devices()[: math.prod(sizes.values())]
    layout = Layout(make_mesh(**sizes, devices=devices), PRESETS["all"])
    attend = kernels.by_kernel("xla", layout=layout)
    assert_equal(results(attend, SCORINGS["sinks"]), expected("sinks"))


@pytest.mark.usefixtures("cudnn_by_xla")
def test_cudnn_gets_the_same_mask():
    found = results(cudnn.masked, SCORINGS["plain"])
    assert_equal(found, expected(), within=1e-6)  # its softmax is in f32


def test_splash_attention_refuses_shared_prefixes():
    layout = Layout(make_mesh(devices=jax.devices()[:1]), PRESETS["all"])
    with pytest.raises(ValueError, match="splash compares one segment per token"):
        results(kernels.by_kernel("splash", layout=layout, interpret=True), SCORINGS["plain"])
