"""Publishing into an engine's recorded arrays: rules, order, refusals, digests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.bridge.base import PoisonedError, RefusedError
from jaxrl.bridge.source import ParamsSource
from jaxrl.bridge.tpu_engine.digest import digest
from jaxrl.bridge.tpu_engine.publisher import EnginePublisher
from jaxrl.bridge.tpu_engine.rules import engine_refusal
from jaxrl.models.model import decoder
from jaxrl.models.rope import Llama3Scaling, Rope, YarnScaling
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS
from tests import tiny
from tests.bridge.tpu_leaves import LEAVES, QWEN2, QWEN3, RecordedEngine

# The products of tpu-inference's models: tokens in, and the leaf.
FORMULAS = {
    "q_proj": "td,dnh->tnh",
    "k_proj": "td,dnh->tnh",
    "v_proj": "td,dnh->tnh",
    "o_proj": "tnh,nhd->td",
    "gate_proj": "td,df->tf",
    "up_proj": "td,df->tf",
    "down_proj": "td,df->tf",
}


@functools.cache
def params(config, seed: int = 0):
    """Random parameters, norms and biases too."""
    drawn = tiny.params(seed, config=config)
    leaves, form = jax.tree.flatten(drawn)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [x + jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(form, moved)


def publisher(config, engine: RecordedEngine, precision: str = "fp32") -> EnginePublisher:
    return EnginePublisher(engine, decoder(config).specs, config=config, precision=precision)


def publish(config, engine: RecordedEngine, values=None) -> None:
    one, values = publisher(config, engine), values or params(config)
    one.check(values)
    one.write(values)


@pytest.mark.parametrize(
    ("config", "shapes"), LEAVES, ids=["qwen3", "qwen2", "untied qwen3", "llama", "tied llama"]
)
def test_the_engine_computes_with_the_learners_tensors(config, shapes) -> None:
    engine = RecordedEngine(shapes)
    publish(config, engine)
    assert engine.calls == ["reset", "start", "write", "refresh", "finish"]
    assert {name: one.shape for name, one in engine.taken.items()} == shapes
    rng = np.random.default_rng(0)
    wire = np.dtype(np.float32)
    for name, tensor in ParamsSource(params(config), decoder(config).specs, dtype=wire):
        *_, module, kind = name.split(".")
        leaf = name
        if config.model_type == "llama":
            kind = "scale" if "norm" in module else "kernel"
            leaf = name.replace(".weight", f".{kind}").replace(
                "embed_tokens.kernel", "embed.embedding"
            )
            leaf = leaf.replace("lm_head.kernel", "model.lm_head")
        held = np.asarray(engine.taken[leaf])
        if module in FORMULAS and kind != "bias":
            x = rng.normal(size=(3, tensor.shape[1])).astype(np.float32)
            taken = x.reshape(3, *held.shape[:-1]) if module == "o_proj" else x
            found = np.einsum(FORMULAS[module], taken, held).reshape(3, -1)
            np.testing.assert_allclose(found, x @ tensor.T, rtol=1e-4, atol=1e-3)
        elif module == "lm_head":
            np.testing.assert_array_equal(held, tensor.T)
        else:
            np.testing.assert_array_equal(held.reshape(tensor.shape), tensor)
        if config.tied and module == "embed_tokens" and config.model_type == "llama":
            np.testing.assert_array_equal(engine.taken["model.lm_head"], tensor)


def test_weights_are_rounded_as_by_every_publish() -> None:
    config, shapes = LEAVES[0]
    engine = RecordedEngine(shapes)
    values = params(config)
    one = publisher(config, engine, "fp32,wire=bf16,sampler=f32")
    one.check(values)
    one.write(values)
    norm = values["final_norm"].astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(engine.taken["model.norm.weight"], norm)


def test_a_sharded_learner_and_an_engine_elsewhere() -> None:
    config, shapes = LEAVES[0]
    devices = jax.devices()
    layout = Layout(make_mesh(fsdp=2, devices=devices[:2]), PRESETS["fsdp"])
    values = jax.device_put(params.__wrapped__(config), layout.tree(decoder(config).specs))
    here, elsewhere = (
        RecordedEngine(shapes),
        RecordedEngine(shapes, sharding=jax.sharding.SingleDeviceSharding(devices[5])),
    )
    for engine in (here, elsewhere):
        publish(config, engine, values)
    jax.tree.map(lambda x: x.delete(), values)  # as a step that donates them does
    for name, one in elsewhere.taken.items():
        assert one.devices() == {devices[5]}
        np.testing.assert_array_equal(one, here.taken[name])


def test_arrays_that_compiled_steps_do_not_take_are_found() -> None:
    config, shapes = LEAVES[0]
    engine = RecordedEngine(shapes)
    engine.refresh = lambda: None
    with pytest.raises(PoisonedError, match=r"in 24 of 24 arrays, such as model\.embed_tokens"):
        publish(config, engine)
    assert engine.calls[-1] == "write"  # nothing is allocated again


def test_one_changed_bit_is_found() -> None:
    config, shapes = LEAVES[0]
    engine = RecordedEngine(shapes)
    leaf = "model.layers.1.self_attn.q_proj.weight"

    def refresh() -> None:
        engine.taken = dict(engine.state)
        word = engine.taken[leaf].view(jnp.uint32)
        engine.taken[leaf] = word.at[3, 1, 5].set(word[3, 1, 5] ^ 1).view(jnp.float32)

    engine.refresh = refresh
    with pytest.raises(PoisonedError, match=rf"in 1 of 24 arrays, such as {leaf}"):
        publish(config, engine)


def test_refused_before_anything_is_written() -> None:
    config, shapes = LEAVES[0]
    leaf = "model.norm.weight"
    with pytest.raises(RefusedError, match=r"more arrays than the model: model\.other"):
        publisher(config, RecordedEngine(shapes | {"model.other": (1,)}))
    with pytest.raises(RefusedError, match=r"fewer arrays than the model: model.norm\.weight"):
        publisher(config, RecordedEngine({k: v for k, v in shapes.items() if k != leaf}))
    with pytest.raises(RefusedError, match=r"norm.weight is float32\[128\].*expected float32\[256"):
        publisher(config, RecordedEngine(shapes | {leaf: (128,)}))
    with pytest.raises(RefusedError, match=r"is bfloat16.*expected float32"):
        publisher(config, RecordedEngine(shapes, dtype=jnp.bfloat16))
    engine = RecordedEngine(shapes)
    one = publisher(config, engine)
    engine.state[leaf] = jax.device_put(engine.state[leaf], jax.devices()[1])
    with pytest.raises(RefusedError, match=r"model.norm\.weight is .*expected"):
        one.check(params(config))
    with pytest.raises(ValueError, match="parameters and specs differ in layers/k_bias"):
        publisher(config, RecordedEngine(shapes)).check(params(QWEN2))
    engine = RecordedEngine(shapes)
    engine.idle = False
    with pytest.raises(RefusedError, match="still has requests"):
        publisher(config, engine).check(params(config))
    assert engine.calls == ["reset"]


@pytest.mark.parametrize(
    ("changes", "shards", "reason"),
    [
        ({"model_type": "qwen3_moe"}, 1, "model_type 'qwen3_moe': it has no model in JAX"),
        ({"model_type": "gemma3_text"}, 1, "served are qwen2, qwen3, llama"),
        ({"model_type": "deepseek_v3"}, 1, "8 bits of a quantised checkpoint"),
        ({"windows": (None, 8)}, 1, "sliding windows"),
        ({"model_type": "qwen2", "tied": False}, 1, "0.32.0 cannot build Qwen2 with a head"),
        ({"head_dim": 80}, 1, "heads have 80 dimensions, which the engine pads"),
        ({}, 4, "4 shards do not divide its 2 heads of keys and values"),
        (
            {"rope": Rope(theta=1e4, scaling=YarnScaling(factor=4.0, original_max_positions=64))},
            1,
            "its rope has YarnScaling",
        ),
    ],
)
def test_models_without_rules_are_refused_with_the_reason(changes, shards, reason) -> None:
    found = engine_refusal(dataclasses.replace(QWEN3, **changes), shards=shards)
    assert found is not None
    assert reason in found


def test_models_with_rules() -> None:
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64
    )
    scaled = dataclasses.replace(QWEN3, rope=Rope(theta=1e4, scaling=scaling))
    assert engine_refusal(scaled, shards=2) is None


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_digest_is_of_numbers_and_places(dtype) -> None:
    x = jax.random.normal(jax.random.key(0), (6, 4, 8), dtype)
    plain = digest(x, (32, 8, 1)).tolist()
    assert digest(x.transpose(2, 0, 1), (1, 32, 8)).tolist() == plain
    sharding = Layout(make_mesh(fsdp=2, devices=jax.devices()[:2]), PRESETS["fsdp"]).sharding
    cut = jax.device_put(x, sharding(("embed", "q_heads", "norm")))
    assert digest(cut, (32, 8, 1)).tolist() == plain
    swapped = x.at[0, 0, 0].set(x[5, 3, 7]).at[5, 3, 7].set(x[0, 0, 0])
    assert digest(swapped, (32, 8, 1)).tolist() != plain
    assert digest(x[::-1], (32, 8, 1)).tolist() != plain
    zeros = jnp.zeros_like(x)
    assert (
        digest(zeros.at[0, 0, 0].set(-0.0), (32, 8, 1)).tolist()
        != digest(zeros, (32, 8, 1)).tolist()
    )
