"""The agreement of a judge with the reward, against scipy's statistics."""

import numpy as np
import pytest
from scipy import stats

from jaxrl.diagnostics.judgement import judge_metrics, ordered_alike


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_agreement_is_somers_d(levels):
    """Ties of the reward count nothing, ties of the judge half."""
    rng = np.random.default_rng(levels)
    rewards = rng.integers(levels, size=60)
    scores = rewards / levels + rng.integers(4, size=60) / 4
    d = stats.somersd(rewards, scores).statistic
    together = np.zeros(60, int)
    assert ordered_alike(rewards, scores, together) == pytest.approx((1 + d) / 2)
    assert ordered_alike(rewards, -scores, together) == pytest.approx((1 - d) / 2)


def test_agreement_with_a_right_or_wrong_reward_is_the_area_under_the_curve():
    rng = np.random.default_rng(0)
    rewards, scores = rng.integers(2, size=40).astype(float), rng.normal(size=40)
    wins = stats.mannwhitneyu(scores[rewards == 1], scores[rewards == 0]).statistic
    area = wins / ((rewards == 1).sum() * (rewards == 0).sum())
    assert ordered_alike(rewards, scores, np.zeros(40, int)) == pytest.approx(area)


def test_completions_are_compared_within_their_prompt():
    """An easy prompt earns more from both, which hides that they disagree on every completion."""
    rewards, scores = np.array([0.0, 1.0, 5.0, 6.0]), np.array([1.0, 0.0, 6.0, 5.0])
    found = judge_metrics(rewards, scores, np.array([3, 3, 8, 8]))
    whole = {"failed": 0, "score": 3, "reward": 3, "min": 0, "max": 6, "agreement": 0}
    assert found == whole
    assert judge_metrics(rewards, scores, np.arange(4))["agreement"] == pytest.approx(2 / 3)


def test_what_is_not_judged_is_left_out():
    rewards, scores = np.array([0.0, 1.0, 1.0]), np.array([0.5, np.nan, 0.5])
    groups = np.zeros(3, int)
    found = judge_metrics(rewards, scores, groups)
    half = {"failed": 1, "score": 0.5, "reward": 0.5, "min": 0.5, "max": 0.5, "agreement": 0.5}
    assert found == half
    assert judge_metrics(rewards, np.full(3, np.nan), groups) == {"failed": 3}
    assert "agreement" not in judge_metrics(np.ones(3), scores, groups)  # the reward orders nothing
