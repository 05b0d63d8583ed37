"""Program size, dtypes of every matrix product, recomputation, padding and gradients."""

import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxrl.core import casts
from jaxrl.core.compiled import jit
from jaxrl.core.precision import PRESETS, parse
from jaxrl.huggingface.config.convert import from_hf_config
from jaxrl.models import spec
from jaxrl.models.model import decoder
from jaxrl.models.row_parts import Rows
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS as RULES
from tests import tiny
from tests.models.references import DELTA, EXPERTS, GPT_OSS, SIZES

FP32 = PRESETS["fp32"]


def config(model_type="qwen3", **settings):
    return from_hf_config(
        {"model_type": model_type, **SIZES, "initializer_range": 0.2, **settings, "head_dim": 8}
    )


def batch(rows=2, length=12):
    tokens = jax.random.randint(jax.random.key(1), (rows, length), 2, SIZES["vocab_size"])
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    return tokens, positions, jnp.where(positions < length - 2, 1, 0)


def total(model, params, *inputs, precision=FP32):
    """A scalar in which every real token of `hidden` counts differently."""
    hidden = model.hidden(params, *inputs, precision=precision).astype(precision.accumulate)
    weights = jnp.cos(jnp.arange(hidden.size, dtype=hidden.dtype)).reshape(hidden.shape)
    real = inputs[2][..., None] > 0
    return jnp.sum(jnp.where(real, hidden * weights, 0))


def lowered(settings, precision, **options):
    model = decoder(settings, **options)
    params = spec.abstract(model.specs, dtype=precision.compute)
    return jax.jit(jax.grad(partial(total, model, precision=precision))).lower(params, *batch())


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_layers_apart_on_a_gpu_change_nothing(remat, monkeypatch):
    settings = config(num_hidden_layers=3)
    layout = Layout(make_mesh(devices=jax.devices()[:1]), RULES["fsdp"])
    model = decoder(settings, remat=remat, layout=layout)
    params, inputs = tiny.drawn(model.specs, 0), batch()
    loss = jax.value_and_grad(partial(total, model))
    loops = jax.jit(loss).lower(params, *inputs)
    monkeypatch.setattr(Rows, "platform", "gpu")
    jax.clear_caches()
    apart = jax.jit(loss).lower(params, *inputs)
    found, expected = (one.compile()(params, *inputs) for one in (apart, loops))
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)
    assert "stablehlo.while" in loops.as_text()
    assert "stablehlo.while" not in apart.as_text()


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_program_does_not_grow_with_layers(remat):
    few, many = (lowered(config(num_hidden_layers=n), FP32, remat=remat).as_text() for n in (2, 8))
    assert len(few.splitlines()) == len(many.splitlines())


@pytest.mark.parametrize(
    ("family", "other", "settings"),
    [("qwen3_next", "linear", DELTA | EXPERTS), ("gpt_oss", "sliding", GPT_OSS)],
)
def test_program_does_not_grow_with_periods(family, other, settings):
    def layers(periods):
        kinds = [f"{other}_attention", "full_attention"] * periods
        return {"num_hidden_layers": 2 * periods, "layer_types": kinds}

    few, many = (
        lowered(config(family, **settings | layers(count)), FP32).as_text() for count in (3, 5)
    )
    assert len(few.splitlines()) == len(many.splitlines())


DOT = re.compile(r"dot_general .*: \(tensor<(\S+)>, tensor<(\S+)>\) -> tensor<(\S+)>")
NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "text", ["fp32", "bf16", "bf16_master", "fp16_master", "bf16_master,activations=f32"]
)
def test_every_product_follows_the_policy(text, family):
    precision = parse(text)
    program = lowered(config(family), precision).as_text()
    found = [tuple(x.rsplit("x", 1)[-1] for x in match) for match in DOT.findall(program)]
    assert program.count("dot_general ") == len(found) >= 3 * 9
    operand = NAMES[precision.compute.name]
    assert set(found) == {(operand, operand, "f32")}


def test_residual_stream_and_gradients_have_their_dtypes():
    precision = parse("bf16_master,activations=f16")
    model = decoder(config())
    params = spec.abstract(model.specs, dtype=precision.compute)
    hidden = jax.eval_shape(partial(model.hidden, precision=precision), params, *batch())
    assert hidden.dtype == precision.activations
    grads = jax.eval_shape(jax.grad(partial(total, model, precision=precision)), params, *batch())
    assert {x.dtype for x in jax.tree.leaves(grads)} == {precision.compute}


def test_remat_changes_memory_and_nothing_else():
    inputs = batch(rows=4, length=64)
    results, memory = {}, {}
    for remat in ("none", "matmuls", "attention", "layer"):
        model = decoder(config(num_hidden_layers=4), remat=remat)
        params = tiny.drawn(model.specs, 0)
        step = jax.jit(jax.grad(partial(total, model))).lower(params, *inputs).compile()
        results[remat] = step(params, *inputs)
        memory[remat] = step.memory_analysis().temp_size_in_bytes
    for grads in results.values():
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), grads, results["none"]
        )
    assert memory["none"] > memory["matmuls"] > memory["attention"] > memory["layer"]


@pytest.mark.parametrize("remat", ["none", "matmuls", "attention"])
def test_16_bits_need_less_memory_than_32(remat):
    inputs = batch(rows=8, length=128)
    model = decoder(config(num_hidden_layers=4, hidden_size=64), remat=remat)
    memory = {}
    for name in ("fp32", "bf16_master", "fp16_master"):
        precision = parse(name)
        params = spec.abstract(model.specs, dtype=precision.params)

        def loss(params, precision=precision):
            return total(model, casts.cast(params, precision.compute), *inputs, precision=precision)

        step = jit(jax.grad(loss)).lower(params).compile()
        memory[name] = step.memory_analysis().temp_size_in_bytes
    assert memory["bf16_master"] < memory["fp32"]
    assert memory["fp16_master"] < memory["fp32"]


def test_an_unknown_remat_is_refused():
    with pytest.raises(ValueError, match="remat='full'; expected one of none, "):
        decoder(config(), remat="full")


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_gradients_agree_with_differences(family):
    f64 = parse("fp32,compute=f64,activations=f64,logits=f64")
    with jax.enable_x64(True):
        model = decoder(config(family, num_hidden_layers=2))
        params = spec.init(model.specs, jax.random.key(0), dtype=f64.compute)
        inputs = batch(rows=1, length=6)
        function = jax.jit(lambda params: total(model, params, *inputs, precision=f64))
        check_grads(function, (params,), order=1, modes=["rev"], eps=1e-6, rtol=1e-6)


def test_padding_is_finite_and_reaches_nothing():
    model = decoder(config())
    params = tiny.drawn(model.specs, 0)
    tokens, positions, segments = batch()
    step = jax.jit(jax.value_and_grad(partial(total, model)))
    expected = step(params, tokens, positions, segments)
    changed = jnp.where(segments > 0, tokens, SIZES["vocab_size"] - 1)
    got = step(params, changed, jnp.where(segments > 0, positions, 99), segments)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    nothing = step(params, tokens, positions, jnp.zeros_like(segments))
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(nothing))


def test_token_gradients_are_summed_in_f32():
    model = decoder(config(num_hidden_layers=1))
    precision = PRESETS["bf16_master"]
    params = casts.cast(tiny.drawn(model.specs, 0), precision.compute)
    # Rows of one token each: their gradients are equal, and 300 of them exceed 8 bits of mantissa.
    ones = jnp.ones((300, 1), jnp.int32)

    def mean(table, rows):
        inputs = (ones[:rows], 0 * ones[:rows], ones[:rows])
        hidden = model.hidden({**params, "embed": table}, *inputs, precision=precision)
        return jnp.sum(hidden.astype(jnp.float32) * jnp.arange(32.0).reshape(1, 1, -1))

    gradient = jax.jit(jax.grad(mean), static_argnums=1)
    one, many = (np.asarray(gradient(params["embed"], rows)[1], float) for rows in (1, 300))
    np.testing.assert_allclose(many, 300 * one, rtol=2**-7)


def test_constrain_sees_stream_heads_and_feed_forward():
    seen = []

    class Watched(Layout):
        def constrain(self, x, axes):
            seen.append((x.shape, tuple(axes)))
            return x

    mesh = make_mesh(devices=jax.devices()[:1])
    lowered(config(), FP32, layout=Watched(mesh, RULES["all"]))
    assert set(seen) == {
        ((2, 12, 32), ("batch", "length", "embed")),
        ((2, 12, 32), ("batch", "length", "q_heads")),
        ((2, 12, 16), ("batch", "length", "kv_heads")),
        ((2, 12, 48), ("batch", "length", "mlp")),
    }


def test_what_linear_layers_cannot_do_is_refused():
    model = decoder(config("qwen3_next", **DELTA | EXPERTS))
    params, inputs = spec.abstract(model.specs, dtype=FP32.params), batch()
    with pytest.raises(ValueError, match="are not supported for qwen3_next"):
        model.hidden(params, *inputs, precision=FP32, seen_until=inputs[1])


def test_a_model_is_hashable():
    model = decoder(config())
    assert {model: 1}[model] == 1
