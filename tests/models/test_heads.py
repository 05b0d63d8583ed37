"""The kernels for norm, rope and order of heads equal the plain form, gradients too."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.precision import parse
from jaxrl.models import heads, heads_on_gpu
from jaxrl.models.attention.kernels import by_kernel
from jaxrl.models.heads import Settings, arrange
from jaxrl.models.layers import LayerContext
from jaxrl.models.model import decoder
from jaxrl.models.rope import Rope, rope_table
from jaxrl.models.spec import init
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS
from tests import tiny

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
    found = results(interpret=True, made_by=heads_on_gpu.by_kernel, **form)
    expected = results(interpret=False, made_by=heads.plain, **form)
    agree(found, expected, normed=normed)


def test_a_decoder_on_tpus_multiplies_keys_by_the_factor_of_the_scores_once(monkeypatch):
    config = dataclasses.replace(tiny.CONFIG, num_layers=1, head_dim=SIZE, query_scalar=4.0)
    layout = Layout(make_mesh(devices=jax.devices()[:1]), PRESETS["all"])
    attend = by_kernel("splash", layout=layout, interpret=True)
    model, precision = decoder(config, attend=attend), parse("bf16_master")
    params = init(model.specs, jax.random.key(0), dtype=jnp.bfloat16)
    tokens = jnp.arange(128, dtype=jnp.int32)[None] % config.vocab_size
    rows = (tokens, jnp.arange(128)[None], jnp.ones_like(tokens))

    def gradients(context):
        monkeypatch.setattr("jaxrl.models.model._Decoder.context", lambda *_: context)

        def loss(params):
            return jnp.sum(
                model.hidden(params, *rows, precision=precision).astype(jnp.float32) ** 3
            )

        return jax.jit(jax.grad(loss))(params)

    wanted = gradients(LayerContext(config, precision))
    own = functools.partial(Settings, interpret=True)
    monkeypatch.setattr("jaxrl.models.block.Settings", own)
    factor = config.score_scale
    found = gradients(LayerContext(config, precision, by_heads=True, key_factor=factor))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = (x.astype(jnp.float32) for x in (a, b))
        assert jnp.linalg.norm(a - b) < 0.02 * jnp.linalg.norm(b)


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
