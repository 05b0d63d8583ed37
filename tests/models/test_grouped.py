"""The kernels of grouped products for NVIDIA GPUs, in Pallas' interpreter on CPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxrl.core.precision import parse
from jaxrl.models import grouped
from jaxrl.models.experts import mixture
from jaxrl.models.grouped import Settings, by_groups, by_rows
from jaxrl.models.layers import LayerContext, undivided
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS
from tests.models.test_experts import CONFIG, FP32, layer, stream

# Rows beyond the groups, empty groups, groups below and above a block, which divides no dimension.
SIZES = (130, 0, 17, 0, 146)
ROWS, TERMS, COLUMNS = 300, 72, 136


def groups_of(x):
    return np.split(np.asarray(x, np.float64), np.cumsum(SIZES))[:-1]


def bound(precision, terms):
    """The largest error of a sum of products in f32, of operands around 1, and of its rounding."""
    return 8 * np.sqrt(terms) * (2.0**-22 + np.float64(jnp.finfo(precision.activations).eps) / 2)


@pytest.mark.parametrize("text", ["fp32", "bf16_master", "fp16_master", "bf16_master,sums=fixed"])
def test_kernels_multiply_each_group_by_its_own_matrix(text):
    precision = parse(text)
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), precision.compute)

    x, y, weights = normal(ROWS, TERMS), normal(ROWS, COLUMNS), normal(len(SIZES), COLUMNS, TERMS)
    x, y = (v.at[sum(SIZES) :].set(jnp.nan) for v in (x, y))  # must not be read
    sizes, each = jnp.array(SIZES, jnp.int32), np.asarray(weights, np.float64)
    settings = Settings(precision, precision.activations, interpret=True)

    def agrees(found, terms, product, *operands):
        expected = [product(*parts) for parts in zip(*operands, strict=True)]
        expected = np.stack(expected) if found.ndim == 3 else np.concatenate(expected)
        assert found.dtype == precision.activations
        found = np.asarray(found, np.float64)
        np.testing.assert_allclose(found, expected, rtol=0, atol=bound(precision, terms))

    found = by_rows(x, weights, sizes, axis=2, settings=settings)[: sum(SIZES)]
    agrees(found, TERMS, lambda rows, matrix: rows @ matrix.T, groups_of(x), each)
    found = by_rows(y, weights, sizes, axis=1, settings=settings)[: sum(SIZES)]
    agrees(found, COLUMNS, np.matmul, groups_of(y), each)
    found = by_groups(x, y, sizes, settings=settings)
    agrees(found, max(SIZES), lambda a, b: a.T @ b, groups_of(x), groups_of(y))


def test_mixture_by_kernels_equals_the_one_on_cpu_on_a_mesh(monkeypatch):
    """Two parts of the experts by two parts of their hidden units, with all gradients."""
    mesh = make_mesh(expert=2, tensor=2, devices=jax.devices()[:4])
    x, one = stream(), layer()

    def gradients(local):
        def total(x, one):
            context = LayerContext(CONFIG, FP32, local=local)
            y, _ = mixture(context.norm(x, one["mlp_norm"]), one, context=context)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

        return jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(x, one)

    expected = gradients(undivided)

    def for_cuda(*operands, cpu=None, cuda=None, default=None):
        chosen = cuda or cpu or default
        assert chosen is not None
        return chosen(*operands)

    monkeypatch.setattr(grouped, "Settings", partial(Settings, interpret=True))
    monkeypatch.setattr(lax, "platform_dependent", for_cuda)
    found = gradients(Layout(mesh, PRESETS["all"]).local)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
