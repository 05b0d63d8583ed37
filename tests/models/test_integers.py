"""Operands of int8 against a reference in numpy."""

import dataclasses
import os
import platform
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.compiled import jit
from jaxrl.core.precision import disagreement, parse, sampler_precision
from jaxrl.models.integers import int8_matmul, integer_product, quantise
from jaxrl.models.model import decoder
from jaxrl.models.spec import init
from tests import tiny

PRECISIONS = {name: parse(f"{name},blocks=int8") for name in ("fp32", "bf16_master", "fp16_master")}


def reference(x):
    """In f32, one operation after the other, as vLLM's kernel on CPUs."""
    factors = (np.abs(x).max(-1, keepdims=True) / np.float32(127)).astype(np.float32)
    inverse = np.where(factors > 0, np.float32(1) / np.where(factors > 0, factors, 1), 0)
    return np.rint(x * inverse.astype(np.float32)).astype(np.int8), factors


def some(shape, *, seed=0):
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=shape) * 2.0 ** rng.integers(-12, 12, (*shape[:-1], 1))).astype(np.float32)
    x[0] = 0
    return x


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rows_are_rounded_as_by_the_reference(dtype):
    x = jnp.asarray(some((400, 300)), dtype)
    integers, factors = jit(quantise)(x)
    expected, theirs = reference(np.asarray(x, np.float32))
    np.testing.assert_array_equal(integers, expected)
    np.testing.assert_array_equal(factors, theirs)
    assert np.abs(integers[1:]).max(-1).min() == 127  # every row uses the whole range
    ties = np.array([[127.0, 0.5, 1.5, -2.5]], np.float32)
    np.testing.assert_array_equal(jit(quantise)(ties)[0], [[127, 0, 2, -2]])


def check_products(name):
    """Also where f32 would not hold the sum: 3000 terms of 127 * 127."""
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-127, 128, (n, 3000)).astype(np.int8) for n in (5, 7))
    x[0], y[0], y[1] = 127, 127, -127
    y[2], y[2, -1] = 127, 126
    expected = x.astype(np.int64) @ y.T.astype(np.int64)
    assert expected[0, 0] == 3000 * 127**2 > 2**24
    for sums in ("any", "fixed"):
        precision = dataclasses.replace(PRECISIONS[name], sums=sums)
        found = jit(integer_product, static_argnames="precision")(x, y, precision=precision)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", PRECISIONS)
def test_products_are_those_of_integers(name):
    check_products(name)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="of x86-64 processors")
def test_products_need_no_units_for_8_bits():
    """Compiled for a processor without VNNI, where a server's sums are wrong and refused."""
    code = "from tests.models.test_integers import PRECISIONS, check_products\n"
    code += "for name in PRECISIONS: check_products(name)"
    own = {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    own |= {"JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, env=os.environ | own)


def test_gradient_is_that_of_the_product_of_rounded_operands():
    """By hand: dx = dy W', dW = dy^T x', where x' and W' are the rounded operands."""
    precision = PRECISIONS["fp32"]
    x, weight = some((2, 5, 300), seed=1), some((140, 300), seed=2)
    dy = np.random.default_rng(0).normal(size=(2, 5, 140)).astype(np.float32)
    y, pull = jax.vjp(lambda x, w: int8_matmul(x, w, precision=precision), x, weight)
    dx, dweight = pull(jnp.asarray(dy))
    rows, matrix = (np.multiply(*reference(v)) for v in (x.reshape(10, 300), weight))
    flat = dy.reshape(10, 140)

    def near(found, expected):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())

    near(y.reshape(10, 140), rows @ matrix.T)
    near(dx.reshape(10, 300), flat @ matrix)
    near(dweight, flat.T @ rows)


def test_policies_with_integers():
    for precision in PRECISIONS.values():
        assert parse(str(precision)) == precision
        assert disagreement(precision) is None
        assert sampler_precision(precision).blocks == "int8"


def test_mixtures_are_refused():
    model = decoder(tiny.MOE)
    params = init(model.specs, jax.random.key(0), dtype=jnp.dtype(jnp.float32))
    batch = jnp.zeros((1, 8), jnp.int32)
    with pytest.raises(ValueError, match="blocks=int8 is for decoders without experts"):
        model.hidden(params, batch, batch, batch, precision=PRECISIONS["fp32"])
