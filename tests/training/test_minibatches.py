"""One description of a minibatch: what plan and the compiler expect is what training passes."""

import dataclasses
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxrl.builders.layout import make_layout
from jaxrl.builders.learner import (
    Learning,
    _drift,
    anchor_note,
    build_learner,
    step_minibatch,
    step_shape,
)
from jaxrl.builders.model import trained_specs
from jaxrl.builders.recipe import make_recipe
from jaxrl.builders.rows import choose_rows
from jaxrl.config.reward import RewardConfig
from jaxrl.core import packing
from jaxrl.core.batch import Minibatch
from jaxrl.core.packing import MinibatchShape, abstract_minibatch
from jaxrl.huggingface.config import convert
from jaxrl.learner.actor_critic import State, side_by_side
from jaxrl.learner.critic import make_critic
from jaxrl.learner.policy import make_learner
from jaxrl.losses import ppo
from jaxrl.losses.scores import Need
from jaxrl.models import init, lora
from jaxrl.models.model import decoder
from jaxrl.training.minibatches import (
    Sequences,
    Targets,
    compute_advantages,
    prepare_minibatch,
    split_sequences,
    with_coefficients,
)
from tests import tiny
from tests.commands.plan.configs import make_config
from tests.learner.test_critic import params as critic_params
from tests.run_config import run_config

TWICE = {"train__updates_per_rollout": "2"}
ANCHOR = {"loss__ratio": "over_anchor"}
SHARED = {"data__max_prompt_tokens": "64", "train__microbatch_tokens": "4096"}


def passed(config, recipe, *, sizes, shape: MinibatchShape, layout) -> Minibatch:
    """The shapes of what training passes to the step, without computing a score."""
    model = decoder(sizes)
    learner, learning_rate = build_learner(config, model, objective=recipe.objective, layout=layout)
    rollouts = tiny.rollouts(8)
    if config.train.replay_routing:
        recorded = (sizes.routed_layers, sizes.experts.per_token)
        rollouts = [
            one._replace(experts=np.zeros((one.length - 1, *recorded), np.int16))
            for one in rollouts
        ]
    by_token = [np.zeros(len(one.completion), np.float32) for one in rollouts]
    critic = recipe.critic is not None
    targets = Targets([0.0] * 8, by_token if critic else None, by_token if critic else None)

    def prepare(params: Any) -> Minibatch:
        learning = Learning(
            recipe=recipe,
            layout=layout,
            shape=shape,
            rows_note="",
            model=model,
            specs=model.specs,
            learner=learner,
            greedy_score=learner.score,
            learning_rate=learning_rate,
            drift=None,
            critic=None,
            reference=params,
        )
        updates = config.train.updates_per_rollout
        made = prepare_minibatch(
            learning, learner.init(params), rollouts=rollouts, targets=targets, updates=updates
        )
        if not recipe.controllers:
            return made
        return with_coefficients(made, dict.fromkeys(recipe.controllers, 0.1))

    return jax.eval_shape(prepare, tiny.params(config=sizes))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, set()),
        (SHARED, {"seen_until"}),
        ({"loss__name": "ppo"}, {"values", "returns"}),
        ({"loss__name": "ppo", "critic__trunk": "shared"} | TWICE, {"values", "returns"}),
        ({"loss__kl": "0.1"}, {"reference"}),
        (ANCHOR, set()),  # the learner itself, with one update
        (ANCHOR | TWICE, {"anchor"}),
        (ANCHOR | TWICE | SHARED | {"loss__kl": "0.1"}, {"anchor", "reference", "seen_until"}),
        ({"loss__kl": "0.1", "loss__kl_target": "0.01"}, {"reference", "coefficients"}),
        ({"train__replay_routing": "true"}, {"experts"}),
    ],
)
def test_the_description_is_what_training_passes(changes, found, tmp_path):
    alone = {"mesh__fsdp": "1", "mesh__tensor": "1"}
    config = make_config(tmp_path, **alone | changes)
    sizes = tiny.MOE if config.train.replay_routing else tiny.CONFIG
    (tmp_path / "config.json").write_text(json.dumps(convert.to_hf_config(sizes, dtype="float32")))
    layout, recipe = make_layout(config.mesh, devices=jax.devices()[:1]), make_recipe(config)
    config, align, _ = choose_rows(config, sizes, objective=recipe.objective, layout=layout)
    shape = step_shape(config, align, sizes=sizes, layout=layout)
    described = step_minibatch(config, recipe, sizes=sizes, shape=shape)
    given = passed(config, recipe, sizes=sizes, shape=shape, layout=layout)
    assert jax.tree.structure(described) == jax.tree.structure(given)
    for expected, array in zip(jax.tree.leaves(described), jax.tree.leaves(given), strict=True):
        assert (expected.shape, expected.dtype) == (array.shape, array.dtype)
        assert not array.weak_type
    optional = {
        field.name
        for part in (described, described.batch)
        for field in dataclasses.fields(part)
        if field.default is None and getattr(part, field.name) is not None
    }
    assert optional == found | {"rewards"}
    left_out = Need.ANCHOR in recipe.objective.needs and "anchor" not in found
    assert bool(anchor_note(recipe, updates=config.train.updates_per_rollout)) == left_out


@pytest.mark.parametrize(
    ("changes", "reports"),
    [
        ({"precision": "bf16_master"}, True),
        ({"precision": "fp32"}, False),
        ({"precision": "bf16_master", "lora__rank": "2"}, False),  # merged weights are published
    ],
)
def test_a_run_reports_what_a_publish_changes(changes, reports, tmp_path):
    config = make_config(tmp_path, **{"mesh__fsdp": "1", "mesh__tensor": "1"} | changes)
    layout, recipe = make_layout(config.mesh, devices=jax.devices()[:1]), make_recipe(config)
    model = decoder(tiny.CONFIG)
    learner, _ = build_learner(config, model, objective=recipe.objective, layout=layout)
    shape = MinibatchShape(row_length=24, rows_per_microbatch=4)

    def step(params: Any) -> Any:
        given = params
        if config.lora.rank:
            specs = trained_specs(config.lora, model.specs)
            adapters = init(specs.adapters, jax.random.key(0), dtype=config.precision.params)
            given = lora.Adapted(adapters, params, specs.alpha)
        batch = packing.pack_minibatch(tiny.rollouts(8), [0.0] * 8, shape=shape)
        return learner.step(learner.init(given), batch)[1]

    found = {name for name in jax.eval_shape(step, tiny.params()) if name.startswith("publish/")}
    assert found == ({"publish/changed", "publish/absorbed"} if reports else set())


@pytest.mark.parametrize(
    ("changes", "merges"),
    [({}, True), ({"lora.publish": "adapters", "sampler.name": "vllm"}, False)],
)
def test_the_drift_is_that_of_the_weights_that_are_published(changes, merges, tmp_path):
    """Servers that load adapters round these, and not the merged weights."""
    config = make_config(
        tmp_path,
        **{"precision": "phantom", "lora.rank": 2, "mesh.fsdp": 1, "mesh.tensor": 1} | changes,
    )
    model = decoder(tiny.CONFIG)
    drift, specs = _drift(config, model, shardings=None), trained_specs(config.lora, model.specs)
    assert drift is not None
    adapters = init(specs.adapters, jax.random.key(0), dtype=np.dtype(np.float32))
    shape = MinibatchShape(row_length=24, rows_per_microbatch=4)
    batch = packing.pack_minibatch(tiny.rollouts(4), [1.0] * 4, shape=shape)
    traced = drift.trace(lora.Adapted(adapters, tiny.params(), specs.alpha), batch)
    assert ("name=_merge" in str(traced.jaxpr)) == merges


def test_the_policys_schedule_ends_with_the_run(tmp_path):
    """Steps in which the critic learns alone are none of the policy's."""
    keys = {"loss.name": "ppo", "optimizer.schedule": "linear", "train.updates_per_rollout": 2}
    keys |= {"train.steps": 50, "critic.pretrain_steps": 30, "mesh.fsdp": 1, "mesh.tensor": 1}
    config = make_config(tmp_path, **keys)
    layout, recipe = make_layout(config.mesh, devices=jax.devices()[:1]), make_recipe(config)
    objective, model = recipe.objective, decoder(tiny.CONFIG)
    _, learning_rate = build_learner(config, model, objective=objective, layout=layout)
    rates = [float(learning_rate(step)) for step in (0, 20, 39, 40)]
    np.testing.assert_allclose(rates, [0.01, 0.005, 0.01 / 40, 0], rtol=1e-5, atol=1e-12)


@pytest.fixture(scope="module")
def targets() -> Callable[[Sequences], Targets]:
    """PPO's targets with lambda = 1 of given sequences."""
    recipe = ppo(lam=1.0)
    assert recipe.critic is not None
    scorer = decoder(dataclasses.replace(tiny.CONFIG, scored=True))
    weights = critic_params()
    policy = make_learner(tiny.model(), recipe.objective, optimizer=optax.sgd(1.0))
    critic = make_critic(scorer, recipe.critic, optimizer=optax.sgd(1.0), precision="fp32")
    both = side_by_side(policy, critic)
    learning: Any = SimpleNamespace(
        recipe=recipe,
        learner=policy,
        critic=both._replace(values=jax.jit(both.values)),
        shape=MinibatchShape(row_length=24, rows_per_microbatch=4),
    )
    config = SimpleNamespace(reward=RewardConfig())
    source = SimpleNamespace(config=config, task=SimpleNamespace(weights={"given": 1.0}))
    run: Any = SimpleNamespace(learning=learning, source=source, hosts=None)
    state = State(policy.init(tiny.params()), critic.init(weights))
    return lambda given: compute_advantages(run, state, given)[0]


def test_a_truncated_completion_continues_in_the_critics_mind(targets):
    """Its value ahead is the value before the next token of the completion that goes on, and its
    last token is worth the reward and that; what ended, or ends elsewhere, has nothing ahead."""
    whole = [
        one._replace(action_mask=np.ones(len(one.completion), bool), components=(one.reward,))
        for one in tiny.rollouts(8, seed=1)
        if len(one.completion) > 1
    ]
    arrays = ("completion", "logprobs", "action_mask", "version")
    short = [one._replace(**{n: getattr(one, n)[:-1] for n in arrays}) for one in whole]
    cut = [one._replace(truncated=i % 2 == 0) for i, one in enumerate(short)]
    ahead = [one[-1] for one in targets(split_sequences(whole, updates=1)).values or ()]
    found = targets(split_sequences(cut, updates=1))
    assert np.abs(ahead).min() > 1e-3
    for i, one in enumerate(cut):
        expected = one.reward + (ahead[i] if one.truncated else 0.0)
        np.testing.assert_allclose((found.returns or ())[i], expected, atol=1e-5)


def test_an_episode_of_several_sequences_continues_after_its_last_one(targets):
    """All its tokens are worth its reward and the value after the last turn of a truncated one,
    whether or not a sequence before it looks cut; tokens of the environment have no target."""
    whole = [one for one in tiny.rollouts(16, seed=1) if len(one.completion) > 2][:8]
    whole = [
        one._replace(
            action_mask=np.arange(len(one.completion)) != 1, components=(one.reward,), branches=()
        )
        for one in whole
    ]
    arrays = ("completion", "logprobs", "action_mask", "version")
    short = [one._replace(**{n: getattr(one, n)[:-1] for n in arrays}) for one in whole]
    cut = [one._replace(truncated=i % 4 in (0, 3)) for i, one in enumerate(short)]
    episodes = [cut[i + 1]._replace(branches=(cut[i],)) for i in range(0, len(cut), 2)]
    ahead = [one[-1] for one in targets(split_sequences(whole, updates=1)).values or ()]
    given = split_sequences(episodes, updates=1)
    returns = targets(given).returns or ()
    assert len(returns) == len(given.rollouts) == 2 * len(episodes) == 8
    assert {one.truncated for one in episodes} == {True, False}
    for i, (one, found) in enumerate(zip(given.rollouts, returns, strict=True)):
        episode, last = episodes[i // 2], ahead[i | 1]
        expected = episode.reward + (last if episode.truncated else 0.0)
        np.testing.assert_allclose(found, np.where(one.action_mask, expected, 0.0), atol=1e-5)


def test_a_server_that_sleeps_is_asked_for_nothing():
    keys = {"sampler.name": "vllm", "sampler.sleep": "true"}
    config = run_config("nothing", **keys)
    rollouts = [one._replace(components=(one.reward,)) for one in tiny.rollouts(2)]
    recipe = dataclasses.replace(make_recipe(config), advantages=lambda given: given.greedy())
    learning: Any = SimpleNamespace(recipe=recipe, critic=None)
    # A sampler would have to be asked, and there is none.
    source = SimpleNamespace(config=config, task=SimpleNamespace(weights={"given": 1.0}))
    run: Any = SimpleNamespace(learning=learning, source=source, hosts=None)
    state: Any = SimpleNamespace(policy=SimpleNamespace(params=None))
    with pytest.raises(ValueError, match=r"sampler\.sleep = true, and the advantage asks the"):
        compute_advantages(run, state, Sequences(rollouts, [slice(0, 2)], None))


def test_rows_without_a_bound_have_no_description():
    with pytest.raises(ValueError, match="max_rows=None"):
        abstract_minibatch(MinibatchShape(row_length=8, rows_per_microbatch=2))
