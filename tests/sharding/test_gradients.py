"""A matrix's gradient is summed over devices by one reduce-scatter, in the dtype of its role."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.precision import parse
from jaxrl.models.products import matmul
from jaxrl.sharding.gradients import GradientSum
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS, make_rules

MESHES = [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 2, "tensor": 2}]


def drawn(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape)


@pytest.mark.parametrize("axes", [("q_heads", "embed"), ("embed", "q_heads"), ("rank", "embed")])
@pytest.mark.parametrize("sizes", MESHES)
def test_the_gradient_equals_that_of_one_device(sizes, axes):
    layout, precision = Layout(make_mesh(**sizes), PRESETS["all"]), parse("fp32")
    own = GradientSum(layout, axes)
    assert own.possible
    x, weight, dy = drawn(8, 4, 16), drawn(24, 16)[:16], drawn(8, 4, 16)

    def gradients(gradient):
        def run(x, weight, dy):
            multiply = partial(matmul, precision=precision, gradient=gradient)
            return jax.vjp(multiply, x, weight)[1](dy)

        return jax.jit(run)

    lowered = gradients(own).lower(x, weight, dy)
    assert len(re.findall("stablehlo.reduce_scatter", lowered.as_text())) == 1
    found, expected = gradients(own)(x, weight, dy), gradients(None)(x, weight, dy)
    assert found[1].sharding == layout.sharding(axes)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("text", "kind"), [("bf16_master", "f32"), ("bf16", "bf16")])
def test_devices_add_in_the_dtype_of_the_role(text, kind):
    layout, precision = Layout(make_mesh(fsdp=8), PRESETS["fsdp"]), parse(text)
    own = GradientSum(layout, ("q_heads", "embed"))

    def run(x, weight):
        return jnp.sum(matmul(x, weight, precision=precision, gradient=own).astype(jnp.float32))

    gradient = jax.jit(jax.grad(run, argnums=1))
    arrays = drawn(8, 4, 16).astype(jnp.bfloat16), drawn(16, 16).astype(jnp.bfloat16)
    text = gradient.lower(*arrays).as_text()
    sums = re.findall(r"stablehlo.reduce_scatter.*?-> tensor<\d+x\d+x(\w+)>", text, re.DOTALL)
    assert sums == [kind]
    # One rounding of an f32 sum.
    expected = np.sum(np.asarray(arrays[0], np.float32), axis=(0, 1))
    if kind == "f32":
        found = np.asarray(gradient(*arrays)[0], np.float32)
        np.testing.assert_allclose(found, expected, rtol=2**-8, atol=1e-6)


def test_only_devices_that_have_different_rows_are_added_over():
    mesh = make_mesh(fsdp=4, tensor=2)
    assert not GradientSum(Layout(mesh, PRESETS["tensor"]), ("q_heads", "embed")).possible
    rules = make_rules(parameters={"embed": "tensor"}, activations={})
    assert not GradientSum(Layout(mesh, rules), ("q_heads", "embed")).possible
