"""Reward shaping: by hand, and in a run that uses all of it."""

import dataclasses

import numpy as np
import pytest

from jaxrl import train
from jaxrl.advantages import lambda_returns
from jaxrl.config import toml_file
from jaxrl.config.reward import RewardConfig
from jaxrl.config.training import Config
from jaxrl.losses.regularizers import k1, k2, k3
from jaxrl.tracking.tracker import read_metrics
from jaxrl.training.rollouts import outcomes
from tests import tiny
from tests.training.test_train import (
    config as small_config,
    material,  # noqa: F401 — the fixture
)


def test_overlong_penalty_is_at_most_one():
    found = outcomes.overlong_penalty(np.array([3, 6, 7, 8, 10]), longest=10, buffer=4)
    np.testing.assert_allclose(found, [0, 0, -0.25, -0.5, -1])


def test_kl_penalty_by_hand():
    given = {
        "learner": [np.array([-1.0, -2.0, -3.0])],
        "reference": [np.array([-1.5, -1.0, 0.0])],
        "masks": [np.array([True, True, False])],
        "coefficient": 0.1,
    }
    d = np.array([-0.5, 1.0])
    for estimator, expected in ((k1, -d), (k2, d**2 / 2), (k3, np.exp(d) - d - 1)):
        found = outcomes.kl_penalties(**given, estimator=estimator)
        np.testing.assert_allclose(found, [[*(0.1 * expected), 0]], rtol=1e-6)


def test_kl_estimator_compiles_once_for_all_lengths():
    sizes = set()

    def spy(d):
        sizes.add(d.shape)
        return k1(d)

    for length in (1, 2, 700, 1000):
        d = np.full(length, 0.5, np.float32)
        (found,) = outcomes.kl_penalties(
            learner=[d], reference=[0 * d], masks=[d > 0], coefficient=1.0, estimator=spy
        )
        np.testing.assert_array_equal(found, d)
    assert len(sizes) == 1


def shaped(rollouts, *, logprobs=pytest.fail, **reward):
    keys = {
        "model": {"path": "m"},
        "data": {"path": "d"},
        "reward": {"path": ["a", "b"]} | reward,
        "sampling": {"max_tokens": 8},
    }
    return outcomes.shaped_outcomes(
        toml_file.validate(Config, keys),
        rollouts,
        weights={"a": 1.0, "b": 0.5},
        logprobs=logprobs,
        greedy=pytest.fail,
    )


def test_outcomes_hold_penalties_and_components():
    rollouts = [r._replace(components=(1.0, 2.0), reward=2.0) for r in tiny.rollouts(3)]
    lengths = np.array([len(r.completion) for r in rollouts])

    known, numbers = shaped(
        rollouts,
        logprobs=lambda: ([np.full(n, -1.0) for n in lengths], [np.full(n, -1.5) for n in lengths]),
        kl=0.2,
        overlong_buffer=8,
    )
    paid = np.array([0.1 * r.action_mask.sum() for r in rollouts])
    np.testing.assert_allclose(known.rewards, 2.0 - lengths / 8 - paid)
    np.testing.assert_allclose([p.sum() for p in known.penalties or []], paid)
    assert known.weights == {"a": 1.0, "b": 0.5, "overlong": 1.0}
    np.testing.assert_allclose(known.components["b"], [2.0] * 3)
    assert numbers == {
        "reward/overlong": pytest.approx(-lengths.mean() / 8),
        "reward/kl": pytest.approx(-paid.mean()),
    }
    for tokens, reward, r in zip(known.token_rewards(), known.rewards, rollouts, strict=True):
        assert tokens.sum() == pytest.approx(reward if r.action_mask.any() else 0.0)


def test_teachers_kl_is_a_mean_over_tokens_that_both_scored():
    rollout = tiny.rollouts(1)[0]._replace(
        completion=np.arange(4),
        action_mask=np.array([True, True, True, False]),
        logprobs=np.array([-1.0, np.nan, -2.0, -3.0]),
        teacher=np.array([-2.0, -1.0, -1.5, -9.0]),
    )
    (advantages,), numbers = outcomes.add_teacher(RewardConfig(), [rollout], np.array([0.25]))
    np.testing.assert_allclose(advantages, [-0.75, 0.25, 0.75, 0.25])
    assert numbers == {"kl/teacher": pytest.approx((1.0 - 0.5) / 2)}


def test_critic_tokens_pay_own_kl_penalty():
    """PPO's reward by hand: -.1 (log pi - log ref) for each token, and 1 for the last besides."""
    rollout = tiny.rollouts(1)[0]._replace(
        completion=np.arange(4), action_mask=np.array([True, True, False, True]), reward=1.0
    )
    learner, reference = [-1.0, -2.0, -9.0, -0.5], [-1.5, -1.0, 0.0, -0.5]
    known, _ = shaped(
        [rollout._replace(components=(1.0, 0.0))],
        logprobs=lambda: ([np.array(learner)], [np.array(reference)]),
        kl=0.1,
    )
    np.testing.assert_allclose(known.token_rewards(), [[-0.05, 0.1, 0.0, 1.0]], atol=1e-7)
    with_values = dataclasses.replace(known, values=[np.array([0.5, 0.6, 7.0, 0.8])])
    # delta: -.05 + .6 - .5, .1 + .8 - .6, 1 - .8; A = delta + .5 A of the next chosen token.
    (returns,) = lambda_returns(with_values, lam=0.5)
    np.testing.assert_allclose(returns, [0.05 + 0.2 + 0.5, 0.4 + 0.6, 0.0, 1.0], atol=1e-6)


def test_without_shaping_rewards_are_unchanged():
    rollouts = [r._replace(components=(1.0, 2.0), reward=2.0) for r in tiny.rollouts(3)]
    known, numbers = shaped(rollouts)
    np.testing.assert_array_equal(known.rewards, [2.0] * 3)
    assert known.penalties is None
    assert numbers == {}


def test_overlong_buffer_longer_than_completions_is_refused():
    with pytest.raises(ValueError, match=r"reward\.overlong_buffer = 9"):
        shaped([], overlong_buffer=9)


def test_run_with_all_shaping(material, tmp_path):  # noqa: F811
    """The first step is at the reference, so it costs nothing; later ones report every part."""
    changes = {
        "loss.name": "remax",
        "loss.entropy_target": "100.0",
        "loss.entropy": "0.01",
        "loss.kl": "0.01",
        "loss.kl_target": "100.0",
        "reward.path": "exact_match,numeric_match",
        "reward.kl": "0.1",
        "reward.overlong_buffer": "4",
        "data.path": str(material / "questions.jsonl"),
    }
    train.train(small_config(material, tmp_path / "run", **changes))
    first, second = [e for e in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward" in e]
    assert first["reward/kl"] == pytest.approx(0.0, abs=1e-4)
    assert second["reward/kl"] != 0
    assert -1 <= first["reward/overlong"] <= 0
    assert first["entropy/coefficient"] == pytest.approx(0.01)
    assert second["entropy/coefficient"] == pytest.approx(0.015)
    assert first["kl/coefficient"] == pytest.approx(0.01)
    assert second["kl/coefficient"] == pytest.approx(0.0098)


def test_run_with_a_baseline_for_each_token(material, tmp_path):  # noqa: F811
    """The energies of tokens come from the policy; weights of the whole batch, and k3 as penalty,
    which is never a gift."""
    changes = {
        "loss.ratio": "over_anchor",
        "loss.advantage": "optimal_token_baseline",
        "loss.correction": "token_tis_normalized + k2_mask",
        "loss.rejection": "k3_sum_mask",
        "loss.nll": "0.1",
        "reward.path": "exact_match",
        "reward.kl": "0.1",
        "reward.kl_estimator": "k3",
        "data.path": str(material / "questions.jsonl"),
    }
    train.train(small_config(material, tmp_path / "run", **changes))
    found = [e for e in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward" in e]
    assert found[-1]["reward/kl"] < 0
    assert all(entry["nll/completion"] > 0 for entry in found)
    assert all(entry["correction/mean"] == pytest.approx(1, abs=0.1) for entry in found)
