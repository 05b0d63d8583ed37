"""The gradient of the gated unit by its kernel for NVIDIA GPUs, in Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxrl.core.gpu_kernels import SWITCH
from jaxrl.core.precision import parse
from jaxrl.models.gated_unit import Settings, Then, gradients, multiplied, plain
from jaxrl.models.integers import int8_matmul
from jaxrl.models.layers import undivided
from jaxrl.models.products import matmul


@pytest.mark.parametrize(("activation", "by"), [("silu", matmul), ("gelu_tanh", int8_matmul)])
def test_gradients_equal_those_of_the_plain_form(activation, by, monkeypatch):
    rng, precision = np.random.default_rng(0), parse("bf16_master")
    gate, up, weight, dy = (
        jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
        for shape in ((2, 32, 64), (2, 32, 64), (24, 64), (2, 32, 24))
    )
    settings = Settings(activation, precision, interpret=True)
    product = functools.partial(by, precision=precision)
    in_one_pass = functools.partial(multiplied, then=Then(product, undivided), settings=settings)

    def of_xla(gate, up, weight):
        return product(plain(gate, up, settings), weight)

    def of(function):
        y, backward = jax.vjp(function, gate, up, weight)
        return [np.asarray(x, np.float64) for x in (y, *backward(dy))]

    expected, called = of(of_xla), []

    def for_cuda(*operands, cuda=None, default=None, **_):
        called.append(cuda)
        return (cuda or default)(*operands)

    monkeypatch.setattr(lax, "platform_dependent", for_cuda)
    found = of(in_one_pass)
    assert any(called)
    for a, b in zip(found, expected, strict=True):
        assert np.mean(a != b) < 0.01  # the same roundings
        np.testing.assert_allclose(a, b, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("switch", [None, "0"])
def test_kernels_are_left_out_where_their_switch_is_off(switch, monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    if switch is not None:
        monkeypatch.setenv(SWITCH, switch)
    given = [jnp.zeros((2, 32, 64), jnp.bfloat16)] * 3
    run = functools.partial(gradients, settings=Settings("silu", parse("bf16_master")))
    assert ("pallas_call" in str(jax.make_jaxpr(run)(*given))) == (switch is None)
