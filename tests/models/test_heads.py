"""The kernels for norm, rope and order of heads equal the plain form, gradients too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.precision import parse
from jaxrl.models import heads
from jaxrl.models.heads import Settings, arrange
from jaxrl.models.heads_on_gpu import by_kernel
from jaxrl.models.rope import Rope, rope_table

BATCH, LENGTH, HEADS, SIZE = 2, 256, 3, 128


def results(
    *, normed, turned, interpret, precision="bf16_master", share=1.0, factor=1.0, made_by=arrange
):
    precision, rng = parse(precision), np.random.default_rng(0)
    dtype = precision.activations
    y = jnp.asarray(rng.normal(size=(BATCH, LENGTH, HEADS * SIZE)), dtype)
    dout = jnp.asarray(rng.normal(size=(BATCH, LENGTH, HEADS, SIZE)), dtype)
    weight = jnp.asarray(rng.normal(size=SIZE), jnp.float32) if normed else None
    positions = jnp.asarray(np.tile(np.arange(LENGTH) % 100, (BATCH, 1)))
    rope = Rope(share=share)
    table = rope_table(positions, rope=rope, head_dim=SIZE, precision=precision)
    settings = Settings(SIZE, 1e-6, precision, factor, interpret)

    @functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    def both(y, weight):
        def made(y, weight):
            return made_by(y, table if turned else None, weight, settings)

        out, backward = jax.vjp(made, y, weight)
        return out, backward(dout)

    return jax.tree.map(lambda x: np.asarray(x, np.float64), both(y, weight))


def plain(monkeypatch, **form):
    with monkeypatch.context() as patched:
        patched.setattr("jaxrl.models.heads._LANES", 10**9)
        return results(interpret=False, **form)


@pytest.mark.parametrize(
    "form",
    [
        {"normed": True, "turned": True, "factor": SIZE**-0.5},
        {"normed": False, "turned": True},
        {"normed": False, "turned": False},
    ],
)
def test_kernels_equal_the_plain_form(form, monkeypatch):
    found = results(interpret=True, **form)
    agree(found, plain(monkeypatch, **form), normed=form["normed"])


def test_join_inverts_arrange():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(BATCH, LENGTH, HEADS, SIZE)), jnp.bfloat16)
    flat, dout = x.reshape(BATCH, LENGTH, -1), 2 * x.reshape(BATCH, LENGTH, -1)
    settings = Settings(SIZE, 1e-6, parse("bf16_master"), interpret=True)
    joined, backward = jax.vjp(functools.partial(heads.join, settings=settings), x)
    np.testing.assert_array_equal(joined, flat)
    np.testing.assert_array_equal(backward(dout)[0], dout.reshape(x.shape))
    np.testing.assert_array_equal(arrange(joined, None, None, settings), x)


@pytest.mark.parametrize("normed", [True, False])
def test_kernels_of_gpus_equal_the_plain_form(normed):
    form = {"normed": normed, "turned": True}
    found = results(interpret=True, made_by=by_kernel, **form)
    expected = results(interpret=False, made_by=heads.plain, **form)
    agree(found, expected, normed=normed)


def agree(found, expected, *, normed):
    (out, (dy, dweight)), (out_expected, (dy_expected, dweight_expected)) = found, expected
    # Both round at the same places, after sums that differ in their order.
    for found, wanted in ((out, out_expected), (dy, dy_expected)):
        assert np.mean(found != wanted) < 0.01
        np.testing.assert_allclose(found, wanted, rtol=2**-7, atol=2**-7)
    if normed:
        np.testing.assert_allclose(dweight, dweight_expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("form", [{"precision": "fp32"}, {"share": 0.5}])
def test_other_forms_are_plain(form):
    """Without interpret mode a kernel could not run here."""
    out, (dy, _) = results(normed=True, turned=True, interpret=False, **form)
    assert out.shape == (BATCH, LENGTH, HEADS, SIZE)
    assert np.abs(dy).max() > 0
