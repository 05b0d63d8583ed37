"""Operands of 8 bits against a reference in numpy, whose E4M3 is that of ml_dtypes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.blocks import MATRICES, round_matrix, round_rows
from jaxrl.core.casts import as_served, cast
from jaxrl.core.compiled import jit
from jaxrl.core.precision import disagreement, parse, sampler_precision
from jaxrl.huggingface.config.convert import from_hf_config
from jaxrl.models import spec
from jaxrl.models.layers import LayerContext, project
from jaxrl.models.model import decoder
from tests import tiny
from tests.sampling.test_exact import FAMILIES, SETTINGS

PRECISION = parse("bf16_master,blocks=e4m3")
F32 = parse("fp32,blocks=e4m3")


def reference(x, *block):
    """Each block divided by the smallest power of two that leaves at most 448, rounded, and
    multiplied again."""
    found = np.zeros(x.shape, np.float64)
    rows, columns = block if len(block) == 2 else (1, *block)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            part = x[i : i + rows, j : j + columns].astype(np.float64)
            factor = 2.0**-100
            while np.abs(part).max() / factor > 448:
                factor *= 2
            numbers = (part / factor).astype(np.float32).astype(jnp.float8_e4m3fn)
            found[i : i + rows, j : j + columns] = numbers.astype(np.float64) * factor
    return found


def some(shape, *, seed=0):
    """Numbers of many sizes; some blocks are all zeros."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-24, 12, shape)
    x[: shape[0] // 2, : min(128, shape[1] // 2)] = 0
    return x.astype(np.float32)


SHAPES = [(3, 40), (128, 128), (130, 300), (256, 513), (1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_blocks_are_rounded_as_by_the_reference(shape, dtype):
    x = np.asarray(jnp.asarray(some(shape), dtype).astype(jnp.float32))
    for function, block in ((round_rows, (128,)), (round_matrix, (128, 128))):
        found = jit(function)(jnp.asarray(x, dtype))
        assert found.dtype == dtype  # which holds every number times its factor
        np.testing.assert_array_equal(np.asarray(found, np.float64), reference(x, *block))
        np.testing.assert_array_equal(jit(function)(found), found)  # again changes nothing


def test_every_number_of_e4m3_stays():
    numbers = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    numbers = np.where(np.isnan(numbers), 448, numbers).reshape(2, 128)
    for factor in (2.0**-100, 2.0**-7, 1.0, 2.0**119):
        np.testing.assert_array_equal(jit(round_rows)(numbers * factor), numbers * factor)
    # At the largest number of a factor: 448 has it, the next number needs twice the factor.
    row = np.array([[448.0, 0.0107], [np.nextafter(np.float32(448), 500), 0.0107]], np.float32)
    np.testing.assert_array_equal(jit(round_rows)(row)[:, 1], [5 * 2.0**-9, 3 * 2.0**-8])


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_infinity_and_nan_stay(odd):
    x = some((4, 256), seed=1)
    x[1, 3] = odd
    for function in (round_rows, round_matrix):
        found = np.asarray(jit(function)(x))
        np.testing.assert_equal(found[1, 3], np.float32(odd))
        assert np.isfinite(found).sum() == x.size - 1
    np.testing.assert_array_equal(jit(round_rows)(x)[2:], reference(x[2:], 128))


def projected(x, layer, precision):
    return project(x, layer, "q", context=LayerContext(tiny.CONFIG, precision))


def test_gradient_is_that_of_the_product_of_rounded_operands():
    """By hand: dx = dy W', dW = dy^T x', where x' and W' are the rounded operands."""
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=(2, 5, n)).astype(np.float32) for n in (300, 140))
    layer = {"q": some((140, 300), seed=2)}
    y, pull = jax.vjp(lambda x, layer: projected(x, layer, F32), x, layer)
    dx, dlayer = pull(jnp.asarray(dy))
    rows = reference(x.reshape(10, 300), 128)
    weight = reference(layer["q"], 128, 128)
    flat = dy.reshape(10, 140).astype(np.float64)
    near = {"rtol": 1e-5, "atol": 1e-5 * np.abs(weight).max()}
    np.testing.assert_allclose(y.reshape(10, 140), rows @ weight.T, **near)
    np.testing.assert_allclose(dx.reshape(10, 300), flat @ weight, **near)
    np.testing.assert_allclose(dlayer["q"], flat.T @ rows, rtol=1e-5, atol=1e-5)


def test_a_publish_rounds_what_the_learner_rounds():
    """The sampler's program rounds activations alone: its weights are rounded when they arrive."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(2, 5, 300)), jnp.bfloat16)
    master = {"q": jnp.asarray(rng.normal(size=(140, 300)), jnp.float32)}
    learner = projected(x, cast(master, PRECISION.compute), PRECISION)
    served = jit(as_served, static_argnums=1)(master, PRECISION)
    assert not np.array_equal(served["q"], cast(master, PRECISION.sampler)["q"])
    sampler = projected(x, served, sampler_precision(PRECISION))
    np.testing.assert_array_equal(learner, sampler)


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_of_all_families_are_named(family):
    """Every matrix of a layer is rounded but those of its routers and gates."""
    config = from_hf_config({"model_type": family, **SETTINGS, **FAMILIES[family]})
    specs = spec.flatten(decoder(config).specs)
    wide = {path.split("/")[-1] for path, one in specs.items() if len(one.shape) > 2}
    plain = {"router", "gates", "linear_beta", "linear_step", "shared_score", "conv"}
    assert {name for name in wide if not name.endswith("_bias")} - MATRICES <= plain
    assert not MATRICES & {path for path, one in specs.items() if "/" not in path}


def test_policies_with_blocks():
    assert disagreement(PRECISION) is disagreement(F32) is None
    assert parse(str(PRECISION)) == PRECISION
    once = sampler_precision(PRECISION)
    assert (once.blocks, sampler_precision(once)) == ("rows", once)
    assert sampler_precision("bf16_master").blocks == "none"
    with pytest.raises(ValueError, match="blocks='e5m2' is not a kind of blocks; use one of none"):
        parse("bf16_master,blocks=e5m2")
    with pytest.raises(ValueError, match="blocks=e4m3 and compute=f16: a number times its factor"):
        parse("fp16_master,blocks=e4m3")
    with pytest.raises(ValueError, match="blocks=e4m3 and sampler=f16"):
        dataclasses.replace(F32, sampler=jnp.float16)
