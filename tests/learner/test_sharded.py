"""Law 1 on meshes: sharded == single device, for scores, gradients and the optimizer's steps."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.builders.optimizer import state_shardings
from jaxrl.config.optimizer import OptimizerConfig
from jaxrl.core.batch import Minibatch, Rollout
from jaxrl.core.metrics import to_floats
from jaxrl.core.packing import MinibatchShape, pack_minibatch
from jaxrl.core.precision import PRESETS as PRECISIONS
from jaxrl.learner.optimizers import make_optimizer, make_schedule
from jaxrl.learner.policy import LearnerState, make_learner
from jaxrl.losses import grpo, with_terms
from jaxrl.models.attention import kernels
from jaxrl.models.families import DecoderConfig
from jaxrl.models.model import decoder
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS
from tests import tiny

LENGTH = 16
ROWS = 8  # to a microbatch, of which there are two


def minibatch(config: DecoderConfig) -> Minibatch:
    """Of a mixture of experts, every second answer knows where its tokens were sent."""
    samples = tiny.rollouts(16, longest=LENGTH)
    if config.experts is not None:
        samples[::2] = [sent_somewhere(one, config) for one in samples[::2]]
    advantages = list(np.random.default_rng(0).normal(size=16))
    shape = MinibatchShape(row_length=LENGTH, rows_per_microbatch=ROWS, packed=False)
    return pack_minibatch(samples, advantages, shape=shape)


def sent_somewhere(rollout: Rollout, config: DecoderConfig) -> Rollout:
    assert config.experts is not None
    shape = (rollout.length - 1, config.routed_layers, 1)
    first = np.random.default_rng(rollout.length).integers(0, config.experts.count, shape)
    others = first + np.arange(config.experts.per_token)
    return rollout._replace(experts=others % config.experts.count)


def run(layout: Layout, config: DecoderConfig, *, offload: bool = False, remat: str = "none"):
    """Scores, gradient (as Adam's first moment), metrics and parameters after two steps."""
    terms = {} if config.experts is None else {"balance": 0.1}
    if config is tiny.MOE:  # what these add does not depend on the family
        terms |= {"top_entropy": 0.5, "positive_nll": 0.1, "observation_nll": 0.1}
    attend = kernels.attend_by("auto", layout=layout, config=config)
    model = decoder(config, remat=remat, layout=layout, attend=attend)
    schedule = make_schedule("constant", learning_rate=1e-2, warmup_steps=0, total_steps=2)
    learner = make_learner(
        model,
        with_terms(grpo(), entropy=0.01, **terms).objective,
        optimizer=make_optimizer(
            "adamw",
            schedule,
            betas=(0.9, 0.9),
            eps=1e-4,  # where a gradient vanishes, Adam would divide rounding by rounding
            weight_decay=0.1,
            clip_norm=0.5,
            specs=model.specs,
        ),
        precision=PRECISIONS["fp32"],
        param_shardings=layout.tree(model.specs),
    )
    # From the host: each array that is divided where it lies is a program of its own.
    params = jax.device_get(tiny.params(config=config))
    params = jax.device_put(params, layout.tree(model.specs))
    settings = OptimizerConfig(offload=offload)
    shardings = state_shardings(settings, learner.init, params, layout=layout, specs=model.specs)
    state = jax.jit(learner.init, out_shardings=shardings)(params)
    batch = minibatch(config)
    rows = jax.tree.map(
        lambda x: layout.batch(("batch", "length")) if x.ndim else layout.replicated, batch
    )
    batch = jax.device_put(batch, rows)
    scores = jax.jit(learner.score)(params, batch)
    step = jax.jit(learner.step, donate_argnums=0, out_shardings=(shardings, None))
    state, metrics = step(state, batch)
    moments = jax.device_get(state.opt_state)
    state, _ = step(state, batch)
    assert jax.tree.map(lambda x: x.sharding, state) == shardings
    assert step._cache_size() == 1
    return jax.device_get((scores, moments, to_floats(metrics), state.params))


@functools.cache
def on_one_device(config: DecoderConfig):
    return run(Layout(make_mesh(devices=jax.devices()[:1]), PRESETS["data"]), config)


def assert_close(a, b, *, rtol):
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        scale = np.abs(y).max() + 1e-30
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(x, y, atol=rtol * scale, rtol=0, err_msg=name)


@pytest.mark.parametrize(
    ("preset", "sizes", "config"),
    [
        ("data", {"data": 8}, tiny.CONFIG),
        ("fsdp", {"fsdp": 8}, tiny.CONFIG),
        ("tensor", {"data": 2, "tensor": 4}, tiny.CONFIG),
        ("fsdp_tensor", {"data": 2, "fsdp": 2, "tensor": 2}, tiny.CONFIG),
        ("expert", {"fsdp": 2, "expert": 2, "tensor": 2}, tiny.MOE),
        ("context", {"fsdp": 2, "context": 2, "tensor": 2}, tiny.CONFIG),
        ("all", {"expert": 2, "context": 2, "tensor": 2}, tiny.MOE),
        ("all", {"fsdp": 4, "context": 2}, tiny.GEMMA),
        ("fsdp_tensor", {"fsdp": 4, "tensor": 2}, tiny.OLMO),
        ("fsdp_tensor", {"fsdp": 4, "tensor": 2}, tiny.PHI),
        ("all", {"expert": 2, "context": 2, "tensor": 2}, tiny.GPT_OSS),
        ("expert", {"fsdp": 2, "expert": 2, "tensor": 2}, tiny.GLM),
        ("fsdp_tensor", {"fsdp": 4, "tensor": 2}, tiny.DEEPSEEK),
        ("all", {"fsdp": 2, "context": 2, "tensor": 2}, tiny.NEXT),
        ("fsdp_tensor", {"fsdp": 4, "tensor": 2}, tiny.MOE),
        ("fsdp_tensor", {"fsdp": 4, "tensor": 2}, tiny.GPT_OSS),
        ("fsdp_tensor", {"fsdp": 4, "tensor": 2}, tiny.NEXT),
        ("fsdp_tensor", {"fsdp": 4, "tensor": 2}, tiny.QWEN3_5),
        ("expert", {"fsdp": 2, "expert": 2, "tensor": 2}, tiny.QWEN3_5_MOE),
    ],
)
def test_a_mesh_changes_nothing_but_rounding(preset, sizes, config):
    scores, moments, metrics, params = run(Layout(make_mesh(**sizes), PRESETS[preset]), config)
    expected = on_one_device(config)
    assert_close(scores, expected[0], rtol=1e-5)
    assert_close(moments, expected[1], rtol=2e-5)
    assert metrics == pytest.approx(expected[2], rel=1e-4, abs=1e-6)
    assert_close(params, expected[3], rtol=1e-4)


def test_layers_that_are_recomputed_on_a_mesh_change_nothing():
    layout = Layout(make_mesh(fsdp=8), PRESETS["fsdp"])
    scores, moments, _, params = run(layout, tiny.CONFIG, remat="layer")
    expected = on_one_device(tiny.CONFIG)
    assert_close(scores, expected[0], rtol=1e-5)
    assert_close(moments, expected[1], rtol=2e-5)
    assert_close(params, expected[3], rtol=1e-4)


def test_parameters_and_moments_are_sharded():
    layout = Layout(make_mesh(fsdp=8), PRESETS["fsdp"])
    model = tiny.model()
    shapes = tiny.params()
    shardings = layout.tree(model.specs)
    held = jax.tree.map(lambda x, s: np.prod(s.shard_shape(x.shape)), shapes, shardings)
    total = sum(x.size for x in jax.tree.leaves(shapes))
    assert sum(jax.tree.leaves(held)) < total / 8 + 300  # norms are whole everywhere


def test_moments_in_the_hosts_memory_change_nothing():
    layout = Layout(make_mesh(fsdp=8), PRESETS["fsdp"])
    found, expected = run(layout, tiny.CONFIG, offload=True), on_one_device(tiny.CONFIG)
    assert_close(found[1], expected[1], rtol=2e-5)
    assert_close(found[3], expected[3], rtol=1e-4)
    shapes = tiny.params()
    placed = state_shardings(
        OptimizerConfig(offload=True),
        lambda params: LearnerState(jnp.int32(0), params, params, jnp.int32(0)),
        shapes,
        layout=layout,
        specs=tiny.model().specs,
    )
    assert {x.memory_kind for x in jax.tree.leaves(placed.opt_state)} == {"pinned_host"}
    assert "pinned_host" not in {x.memory_kind for x in jax.tree.leaves(placed.params)}


def test_devices_without_host_memory_are_named():
    memory = SimpleNamespace(kind="hbm")
    device = SimpleNamespace(
        device_kind="Abacus", process_index=0, addressable_memories=lambda: [memory]
    )
    mesh = SimpleNamespace(devices=np.array([device]))
    layout: Any = SimpleNamespace(mesh=mesh, state=lambda state, specs: state)
    with pytest.raises(ValueError, match="needs the memory pinned_host, but Abacus has only hbm"):
        state_shardings(OptimizerConfig(offload=True), dict, {}, layout=layout, specs={})
