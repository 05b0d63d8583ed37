"""Sharing prompts changes no score, loss or gradient: with every kind of model and loss."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxrl.core.batch import Minibatch, Rollout
from jaxrl.core.metrics import to_floats
from jaxrl.core.packing import ANYWHERE, SHARED, MinibatchShape, pack_minibatch, unpack
from jaxrl.core.precision import parse
from jaxrl.learner.actor_critic import Optimizers, State, shared_trunk
from jaxrl.learner.critic import make_critic
from jaxrl.learner.policy import VALUE_HEAD, Learner, make_learner
from jaxrl.losses import clipped, gspo, objective, ppo, shadowed, token_mean, with_terms
from jaxrl.models import lora, spec
from jaxrl.models.attention import kernels
from jaxrl.models.model import decoder
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS
from tests import tiny

# The learner takes its steps in f32: a gradient is rounded to it once.
F64 = parse("fp32,compute=f64,activations=f64,logits=f64,grads=f64,sampler=f64")
TREE = MinibatchShape(row_length=48, rows_per_microbatch=2, max_rows=10, align=SHARED)
ALONE = dataclasses.replace(TREE, packed=False)  # for the program that is compiled for TREE
PLAIN = dataclasses.replace(TREE, align=ANYWHERE)
WINDOWED = dataclasses.replace(tiny.CONFIG, windows=(None, 5))
COUNT = 10


def groups(*, experts: int = 0) -> list[Rollout]:
    """Three groups; the prompts of two have instructions in common. With `experts`, the tokens of
    one group know theirs."""
    rng = np.random.default_rng(0)
    first = rng.integers(2, 64, 9)
    prompts = [first, np.append(first[:6], rng.integers(2, 64, 4)), rng.integers(2, 64, 3)]
    found = []
    for i, one in enumerate(tiny.rollouts(COUNT, longest=14)):
        found.append(one._replace(prompt=prompts[i // 4].astype(np.int32), group=i // 4))
    if experts:
        routed = rng.integers(0, experts, (len(first), 2, 1))
        for i in range(4):
            own = rng.integers(0, experts, (len(found[i].completion) - 1, 2, 1))
            both = np.concatenate([routed, own])
            found[i] = found[i]._replace(experts=np.concatenate([both, (both + 1) % experts], -1))
    return found


def packed(samples: list[Rollout], shape: MinibatchShape, **targets: Any) -> Minibatch:
    advantages = list(np.random.default_rng(1).normal(size=len(samples)))
    return pack_minibatch(samples, advantages, shape=shape, **targets)


def test_tokens_are_saved():
    tree, plain = (np.asarray(packed(groups(), s).batch.segments) for s in (TREE, PLAIN))
    assert np.count_nonzero(tree) < 0.65 * np.count_nonzero(plain)


def assert_close(found: Any, wanted: Any) -> None:
    leaves = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    for (path, x), y in leaves:
        np.testing.assert_allclose(x, y, atol=5e-7 * np.abs(y).max(), rtol=0, err_msg=str(path))


def moved(before: Any, after: Any) -> Any:
    """The gradient: what sgd with a learning rate of 1 subtracted."""
    return jax.tree.map(lambda a, b: np.asarray(a - b), before, after)


def targets(samples: list[Rollout]) -> dict[str, list[np.ndarray]]:
    """Numbers for each token, by name."""
    rng = np.random.default_rng(4)
    names = ("values", "returns")
    return {k: [rng.normal(size=len(s.completion)).astype("f4") for s in samples] for k in names}


def compare(
    one: Learner, samples: list[Rollout], params: Any, *, apart: MinibatchShape = ALONE
) -> None:
    """Gradients and metrics of sequences in trees and apart."""
    found = []
    with jax.enable_x64(True):
        step = jax.jit(one.step)
        for shape in (TREE, apart):
            minibatch = packed(samples, shape, **targets(samples))
            given = {"anchor": minibatch.batch.values, "reference": minibatch.batch.returns}
            state, metrics = step(one.init(params), dataclasses.replace(minibatch, **given))
            trained = lora.trainable(params), lora.trainable(state.params)
            found.append((moved(*trained), to_floats(metrics)))
    (gradient, numbers), (expected, same) = found
    assert max(np.abs(x).max() for x in jax.tree.leaves(expected)) > 1e-3
    assert_close(gradient, expected)
    for name, value in same.items():
        assert numbers[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def scored(score: Any, samples: list[Rollout], *more: Any) -> list[np.ndarray]:
    """Scores by rollout; those of sequences in trees and apart are equal."""
    with jax.enable_x64(True):
        score = jax.jit(score)
        tree, plain = (
            np.concatenate(
                unpack(np.asarray(score(*more, packed(samples, shape))), samples, shape=shape)
            )
            for shape in (TREE, ALONE)
        )
    np.testing.assert_allclose(tree, plain, rtol=0, atol=1e-11)
    return plain


def learner(config=tiny.CONFIG, recipe=None, *, layout: Layout | None = None, **kwargs) -> Learner:
    if layout is None:
        model = decoder(config, remat="matmuls")
    else:
        attend = kernels.attend_by("auto", layout=layout, config=config)
        model = decoder(config, layout=layout, attend=attend)
        kwargs["param_shardings"] = layout.tree(model.specs)
    recipe = recipe or with_terms(gspo(), entropy=0.1, kl=0.1)
    return make_learner(
        model,
        getattr(recipe, "objective", recipe),
        optimizer=optax.sgd(1.0),
        precision=F64,
        **kwargs,
    )


def test_sequence_loss_with_entropy_and_windows():
    one, params = learner(WINDOWED), tiny.params(config=WINDOWED)
    compare(one, groups(), params, apart=PLAIN)
    assert scored(one.score, groups(), params).any()


def test_a_loss_with_a_shadow_and_adapters():
    recipe = objective(clipped(shadowed), token_mean)
    specs = lora.adapter_specs(decoder(tiny.CONFIG).specs, rank=2, targets=["*_proj"])
    adapters = spec.init(specs, jax.random.key(1), dtype=F64.params)
    adapters = jax.tree.map(lambda x: x + 0.1, adapters)
    params = lora.Adapted(adapters, tiny.params(), alpha=4.0)
    compare(learner(recipe=recipe), groups(), params)


@pytest.mark.parametrize("config", [tiny.MOE, tiny.GPT_OSS], ids=["qwen3_moe", "gpt_oss"])
def test_experts_that_are_replayed(config):
    samples = groups(experts=config.experts.count)
    compare(learner(config), samples, tiny.params(config=config))


def test_rows_cut_over_devices():
    layout = Layout(make_mesh(data=2, context=2, tensor=2), PRESETS["all"])
    one = learner(layout=layout)
    placed = jax.device_put(tiny.params(), layout.tree(decoder(tiny.CONFIG).specs))
    compare(one, groups(), placed)


SGD = optax.sgd(1.0)


def head(seed: int) -> dict:
    values = np.random.default_rng(seed).normal(size=(1, tiny.CONFIG.hidden_size))
    return {VALUE_HEAD: values.astype("f4")}


def test_a_critic_of_its_own():
    recipe = ppo().critic
    assert recipe is not None
    config = dataclasses.replace(tiny.CONFIG, scored=True)
    one = make_critic(decoder(config), recipe, optimizer=SGD, precision=F64)
    params = tiny.params(config=config) | head(0)
    assert scored(one.values, groups(), params).any()
    compare_steps(one.step, one.init(params))


def test_a_critic_on_the_policys_trunk():
    one = shared_trunk(
        tiny.model(), ppo(), coefficient=0.5, optimizers=Optimizers(SGD, SGD), precision=F64
    )
    policy = make_learner(tiny.model(), ppo().objective, optimizer=SGD, precision=F64)
    compare_steps(one.step, State(policy.init(tiny.params()), one.init(head(0))))


def compare_steps(step: Any, before: Any) -> None:
    """Changes of the whole state by sequences in trees and apart."""
    samples = groups()
    with jax.enable_x64(True):
        step = jax.jit(step)
        tree, plain = (
            step(before, packed(samples, shape, **targets(samples)))[0] for shape in (TREE, ALONE)
        )
    assert_close(moved(before, tree), moved(before, plain))


def test_plain_rows_have_no_tree():
    assert PLAIN.align == ANYWHERE
    assert packed(groups(), PLAIN).batch.seen_until is None
