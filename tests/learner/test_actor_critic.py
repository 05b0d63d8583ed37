"""A critic on the policy's trunk: one loss, one trunk, and the policy stays a language model."""

import jax
import numpy as np
import optax
import pytest

from jaxrl.bridge.source import ParamsSource
from jaxrl.core.batch import Minibatch
from jaxrl.core.metrics import to_floats
from jaxrl.core.packing import MinibatchShape, pack_minibatch
from jaxrl.core.precision import PRESETS
from jaxrl.learner.actor_critic import ActorCritic, Optimizers, State, shared_trunk
from jaxrl.learner.critic import make_critic
from jaxrl.learner.policy import VALUE_HEAD, make_learner
from jaxrl.losses import grpo, ppo
from jaxrl.models.model import decoder
from tests import tiny
from tests.learner.test_critic import MODEL, ROLLOUTS, ROW, TARGETS, params

FP32 = PRESETS["fp32"]
SGD = optax.sgd(1.0)  # a step subtracts the gradient
RECIPE = ppo(value_clip=100.0)
POLICY = make_learner(tiny.model(), RECIPE.objective, optimizer=SGD, precision=FP32)


def shared(coefficient: jax.Array | float, *, head_optimizer=SGD) -> ActorCritic:
    return shared_trunk(
        tiny.model(),
        RECIPE,
        coefficient=coefficient,  # one program for all
        optimizers=Optimizers(SGD, head_optimizer),
        precision=FP32,
    )


@jax.jit
def step(coefficient, state, minibatch):
    return shared(coefficient).step(state, minibatch)


def states(one: ActorCritic, *, at: dict | None = None) -> State:
    policy = dict(at or params())
    head = {VALUE_HEAD: policy.pop(VALUE_HEAD)}
    return State(POLICY.init(policy), one.init(head))


@pytest.fixture(scope="module")
def minibatch() -> Minibatch:
    rng = np.random.default_rng(0)
    values = [0.1 * rng.normal(size=len(t)).astype(np.float32) for t in TARGETS]
    return pack_minibatch(
        ROLLOUTS,
        list(rng.normal(size=8)),
        shape=MinibatchShape(row_length=ROW, rows_per_microbatch=4, packed=False),
        values=values,
        returns=TARGETS,
    )


def whole(state: State) -> dict:
    return state.policy.params | state.critic_state.params


def moved(before: dict, after: dict) -> dict:
    return jax.tree.map(lambda a, b: np.asarray(a - b), before, after)


def assert_close(a: dict, b: dict) -> None:
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max(), err_msg=str(path))


def test_gradient_is_policy_plus_scaled_critic(minibatch):
    """The critic alone is a network of its own with the same weights."""
    critic = make_critic(MODEL, RECIPE.critic, optimizer=SGD, precision=FP32)
    alone, _ = jax.jit(critic.step)(critic.init(params()), minibatch)
    its = moved(params(), alone.params)
    before = states(shared(0.0))
    policy, _ = jax.jit(POLICY.step)(before.policy, minibatch)
    own = moved(before.policy.params, policy.params)
    for coefficient in (0.0, 0.5):
        after, metrics = step(coefficient, before, minibatch)
        found = moved(whole(before), whole(after))
        # The value gradient is not small beside the policy's: it would be missed.
        head = {VALUE_HEAD: 0 * its[VALUE_HEAD]}
        expected = jax.tree.map(lambda p, v, c=coefficient: p + c * v, own | head, its)
        assert_close(found, expected)
        assert {"value/loss", "value/mean", "value/clipped", "grad_norm"} <= metrics.keys()
    assert np.abs(its["layers"]["q"]).max() > 0.1 * np.abs(own["layers"]["q"]).max()


def test_the_gradient_is_the_numerical_one(minibatch):
    """Along itself, the loss falls by the square of its norm."""
    one = shared(0.5)
    before = states(one)
    after, metrics = step(0.5, before, minibatch)
    direction = moved(whole(before), whole(after))
    norm = float(optax.tree.norm(direction))
    assert to_floats(metrics)["grad_norm"] == pytest.approx(norm, rel=1e-4)

    def loss(size: float) -> float:
        there = jax.tree.map(lambda x, d: x + size * d / norm, whole(before), direction)
        return to_floats(step(0.5, states(one, at=there), minibatch)[1])["loss"]

    assert (loss(2e-3) - loss(-2e-3)) / 4e-3 == pytest.approx(norm, rel=1e-2)


def test_pretraining_changes_the_head_only(minibatch):
    one = shared(0.5, head_optimizer=optax.adam(3e-2))
    values, pretrain = jax.jit(one.values), jax.jit(one.pretrain)
    state, found = states(one), []
    for _ in range(30):
        state, metrics = pretrain(state, minibatch)
        found.append(to_floats(metrics))
        assert all(name.startswith("value/") for name in metrics)
    assert found[-1]["value/loss"] < 0.5 * found[0]["value/loss"]
    mask = np.asarray(minibatch.batch.action_mask)
    for at, metrics in ((states(one), found[0]), (state, to_floats(pretrain(state, minibatch)[1]))):
        mean = np.asarray(values(at, minibatch))[mask, 0].mean()
        assert mean == pytest.approx(metrics["value/mean"], abs=1e-6)
    before = states(one)
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), state.policy, before.policy)
    assert all(jax.tree.leaves(same))


def test_the_policy_never_holds_the_head(minibatch):
    """What is published and exported declares every tensor; one more would be refused."""
    one = shared(0.5)
    after, _ = step(0.5, states(one), minibatch)
    assert jax.tree.structure(after.policy) == jax.tree.structure(POLICY.init(tiny.params()))
    source = ParamsSource(after.policy.params, tiny.model().specs, dtype=FP32.wire)
    assert not [name for name, _ in source if "score" in name]
    with pytest.raises(ValueError, match="differ in score"):
        ParamsSource(whole(after), tiny.model().specs, dtype=FP32.wire)


def test_what_does_not_fit_is_refused(minibatch):
    both = Optimizers(SGD, SGD)
    with pytest.raises(ValueError, match="a recipe with a critic"):
        shared_trunk(tiny.model(), grpo(), coefficient=0.1, optimizers=both, precision=FP32)
    goal = RECIPE.critic.objective
    headless = make_learner(decoder(tiny.CONFIG), goal, optimizer=SGD, precision=FP32)
    with pytest.raises(ValueError, match="no value head"):
        headless.step(headless.init(tiny.params()), minibatch)
