"""Routing, the grouped product, balance, and routing replay."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.test_util import check_grads
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from jaxrl.core.precision import PRESETS, parse
from jaxrl.models import spec
from jaxrl.models.experts import imbalance, mixture, route
from jaxrl.models.layers import LayerContext
from jaxrl.models.model import decoder
from jaxrl.sharding import Layout, make_mesh
from jaxrl.sharding.rules import PRESETS as RULES
from tests import tiny

FP32 = PRESETS["fp32"]
CONFIG = dataclasses.replace(tiny.MOE, num_layers=1)
EXPERTS = CONFIG.experts
assert EXPERTS is not None


def layer(dtype=FP32.params):
    params = tiny.params(config=CONFIG)
    return {name: np.asarray(x[0], dtype) for name, x in params["layers"].items()}


def stream(length=9, seed=1):
    return jax.random.normal(jax.random.key(seed), (2, length, CONFIG.hidden_size))


def one_by_one(x, one, *, experts, weights):
    """The mixture as its definition says it, token by token."""
    x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + CONFIG.rms_norm_eps)
    x = x * one["mlp_norm"]
    out = np.zeros_like(x)
    for index in np.ndindex(experts.shape):
        e, token = experts[index], x[index[:2]]
        gate, up = one["expert_gate"][e] @ token, one["expert_up"][e] @ token
        hidden = gate / (1 + np.exp(-gate)) * up
        out[index[:2]] += weights[index] * (one["expert_down"][e] @ hidden)
    return out


def feed_forward(x, one, *, config, precision, recorded=None):
    context = LayerContext(config, precision)
    return mixture(context.norm(x, one["mlp_norm"]), one, context=context, recorded=recorded)


@pytest.mark.parametrize("renormalise", [True, False])
def test_token_is_weighted_sum_of_experts(renormalise):
    config = dataclasses.replace(
        CONFIG, experts=dataclasses.replace(EXPERTS, renormalise=renormalise)
    )
    x, one = stream(), layer()
    y, routing = jax.jit(partial(feed_forward, config=config, precision=FP32))(x, one)
    assert routing is not None
    experts, weights, probs = (
        np.asarray(part) for part in (routing.experts, routing.weights, routing.probs)
    )
    best = np.argsort(-probs, axis=-1)[..., : EXPERTS.per_token]
    np.testing.assert_array_equal(experts, best)
    chosen = np.take_along_axis(probs, best, axis=-1)
    expected = chosen / chosen.sum(-1, keepdims=True) if renormalise else chosen
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    host = {name: np.asarray(value) for name, value in one.items()}
    summed = one_by_one(np.asarray(x), host, experts=experts, weights=weights)
    np.testing.assert_allclose(y, summed, rtol=1e-4, atol=1e-5)


def test_gradients_agree_with_differences():
    f64 = parse("fp32,compute=f64,activations=f64,logits=f64")
    with jax.enable_x64(True):
        x, one = stream(length=4).astype(f64.compute), layer(f64.compute)

        def total(x, one):
            y, _ = feed_forward(x, one, config=CONFIG, precision=f64)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape))

        check_grads(jax.jit(total), (x, one), order=1, modes=["rev"], eps=1e-6, rtol=1e-6)


@pytest.mark.parametrize("text", ["bf16_master", "fp16_master", "bf16_master,activations=f32"])
def test_every_product_follows_the_policy(text):
    precision = parse(text)

    def total(x, one):
        y, _ = feed_forward(x, one, config=CONFIG, precision=precision)
        return jnp.sum(y.astype(jnp.float32))

    one = jax.tree.map(lambda x: x.astype(precision.compute), layer())
    found = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
    _, grads = jax.eval_shape(found, stream().astype(precision.activations), one)
    assert {x.dtype for x in jax.tree.leaves(grads[1])} == {precision.compute}
    assert grads[0].dtype == precision.activations
    program = found.lower(stream().astype(precision.activations), one).as_text()
    products = re.findall(
        r"dot_general .*: \(tensor<\S+x(\w+)>, tensor<\S+x(\w+)>\) -> tensor<\S+x(\w+)>", program
    )
    operand = {"bfloat16": "bf16", "float16": "f16"}[precision.compute.name]
    assert len(products) == 3 * 4  # the router and three projections, forward and backward
    assert set(products) == {(operand, operand, "f32")}


def test_devices_do_not_cut_blocks_of_eight_bits():
    layout = Layout(make_mesh(tensor=2, devices=jax.devices()[:2]), RULES["fsdp_tensor"])
    x, one = stream(), layer()
    units = EXPERTS.intermediate_size

    def traced(precision):
        context = LayerContext(CONFIG, parse(precision), layout.constrain, layout.local)
        return jax.eval_shape(partial(mixture, context=context), x, one)

    with pytest.raises(ValueError, match=f"each device has {units // 2} of an expert's {units} "):
        traced("fp32,blocks=e4m3")
    assert traced("fp32")[0].shape == x.shape


def test_routing_is_not_rounded_to_half_precision():
    x, router = stream(), layer()["router"]
    precision = PRESETS["bf16_master"]
    routing = route(x, {"router": router}, context=LayerContext(CONFIG, precision))
    assert {routing.probs.dtype, routing.weights.dtype} == {precision.accumulate}
    rounded = (a.astype(precision.compute).astype(jnp.float32) for a in (x, router))
    exact = jax.nn.softmax(jnp.einsum("btd,ed->bte", *rounded))
    np.testing.assert_allclose(routing.probs, exact, rtol=1e-5)


def test_imbalance_equals_transformers():
    x, router = stream(length=12), layer()["router"]
    segments = jnp.array([[1] * 5 + [2] * 4 + [0] * 3, [1] * 12])
    routing = route(x, {"router": router}, context=LayerContext(CONFIG, FP32))
    cost = imbalance(routing, segments)
    logits = jnp.einsum("btd,ed->bte", x, router)
    for row, segment in ((0, 1), (0, 2), (1, 1)):
        inside = np.asarray(segments[row]) == segment
        expected = load_balancing_loss_func(
            (torch.tensor(np.asarray(logits[row])[inside]),), EXPERTS.count, EXPERTS.per_token
        )
        assert np.mean(cost[row][inside]) == pytest.approx(float(expected), rel=1e-5)
    assert not np.any(cost[0, -3:])


def test_replayed_experts_still_train_the_router():
    x, one = stream(), layer()
    run = jax.jit(partial(feed_forward, config=CONFIG, precision=FP32))
    _, own = run(x, one)
    other = (own.experts + 1) % EXPERTS.count
    recorded = other.at[0, :3].set(-1)  # the first three tokens of a row have no record
    got, routing = run(x, one, recorded=recorded)
    assert routing is not None
    np.testing.assert_array_equal(routing.experts[0, :3], own.experts[0, :3])
    np.testing.assert_array_equal(routing.experts[1], other[1])
    weights = np.take_along_axis(np.asarray(own.probs), np.asarray(routing.experts), axis=-1)
    expected = weights / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(routing.weights, expected, rtol=1e-6)

    def total(router):
        y, _ = run(x, {**one, "router": router}, recorded=recorded)
        return jnp.sum(y * y)

    assert float(jnp.abs(jax.grad(total)(one["router"])).max()) > 0
    assert np.isfinite(got).all()


def test_forward_pass_repeats_its_routing():
    model = decoder(tiny.MOE)
    params = tiny.params(config=tiny.MOE)
    tokens = jax.random.randint(jax.random.key(3), (2, 10), 2, 64)
    positions = jnp.broadcast_to(jnp.arange(10), tokens.shape)
    inputs = (params, tokens, positions, jnp.ones_like(tokens))
    assert model.hidden_routed is not None
    run = jax.jit(partial(model.hidden_routed, precision=FP32))
    first = run(*inputs)
    assert first.experts.shape == (2, 10, tiny.MOE.num_layers, EXPERTS.per_token)
    again = run(*inputs, recorded=first.experts)
    np.testing.assert_array_equal(again.experts, first.experts)
    np.testing.assert_allclose(again.hidden, first.hidden, rtol=1e-6)
    np.testing.assert_allclose(
        first.hidden, jax.jit(partial(model.hidden, precision=FP32))(*inputs), rtol=1e-6
    )


def test_remat_repeats_as_many_products_as_it_says():
    tokens = jnp.ones((2, 7), jnp.int32)

    def products(remat):
        model = decoder(CONFIG, remat=remat)

        def total(params):
            return jnp.sum(model.hidden(params, tokens, tokens, tokens, precision=FP32))

        program = jax.jit(jax.grad(total)).lower(spec.abstract(model.specs, dtype=FP32.compute))
        return len(re.findall("dot_general", program.as_text()))

    # `layer`: query, key, value, attention's two, output, router, gate and up. What an expert's
    # last matrix gives is not needed again.
    assert products("none") == products("matmuls") == products("layer") - 9


@pytest.mark.parametrize("base", [tiny.MOE, tiny.DEEPSEEK], ids=["one group", "two groups"])
def test_program_size_is_independent_of_depth(base):
    def lines(layers, count):
        experts = dataclasses.replace(base.experts, count=count)
        config = dataclasses.replace(base, num_layers=layers, experts=experts)
        model = decoder(config, remat="matmuls")
        tokens = jnp.ones((2, 7), jnp.int32)

        def total(params):
            return jnp.sum(model.hidden(params, tokens, tokens, tokens, precision=FP32))

        program = jax.jit(jax.grad(total)).lower(spec.abstract(model.specs, dtype=FP32.compute))
        return len(program.as_text().splitlines())

    assert lines(3, 24) == lines(6, 24) == lines(3, 48)
