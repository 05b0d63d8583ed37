"""Advantages and targets from a critic's values."""

import numpy as np
import pytest

from jaxrl.advantages import (
    Outcomes,
    explained_variance,
    gae,
    generalized,
    lambda_returns,
    length_adaptive,
)

# The worked example of tests/advantages/test_gae.py, with a token between that is not an action,
# and an answer whose reward could not be computed.
VALUES = [np.array([0.5, 0.6, 9.0, 0.7, 0.8]), np.array([0.1, 0.2])]
MASKS = [np.array([True, True, False, True, True]), np.array([True, True])]
RAW = np.array([0.4292, 0.3564, 0.0, 0.2801, 0.2])
CHOSEN = MASKS[0]


def outcomes(**changes) -> Outcomes:
    known = {
        "rewards": np.array([1.0, np.nan]),
        "groups": np.array([0, 1]),
        "action_masks": MASKS,
        "values": VALUES,
    }
    return Outcomes(**known | changes)


def test_advantages_are_whitened_over_known_tokens():
    found, unknown = generalized(outcomes(), gamma=0.99, lam=0.95)
    raw = RAW[CHOSEN]
    expected = (raw - raw.mean()) / raw.std(ddof=1)
    np.testing.assert_allclose(found[CHOSEN], expected, atol=2e-3)
    assert found[2] == 0
    np.testing.assert_array_equal(unknown, 0)
    assert found[CHOSEN].mean() == pytest.approx(0, abs=1e-6)
    assert found[CHOSEN].std(ddof=1) == pytest.approx(1, abs=1e-6)


def test_lambda_grows_with_the_length():
    """lam = 1 - 1 / (alpha l): 1 - 1 / 2 for the four tokens, 0 for the two."""
    both = outcomes(rewards=np.array([1.0, 0.5]))
    found = np.concatenate(length_adaptive(both, gamma=0.99, alpha=0.5))
    raw = [
        gae(rewards, values, mask, gamma=0.99, lam=lam)[0]
        for rewards, values, mask, lam in zip(
            both.token_rewards(), VALUES, MASKS, (0.5, 0.0), strict=True
        )
    ]
    raw, mask = np.concatenate(raw), np.concatenate(MASKS)
    expected = (raw - raw[mask].mean()) / raw[mask].std(ddof=1)
    np.testing.assert_allclose(found[mask], expected[mask], rtol=1e-5)


def test_returns_are_advantages_and_values():
    returns, _ = lambda_returns(outcomes(), gamma=0.99, lam=0.95)
    np.testing.assert_allclose(returns[CHOSEN], (RAW + VALUES[0])[CHOSEN], atol=1e-4)
    # lam 1 trusts the rewards alone: the critic's target is the discounted reward.
    (returns, _) = lambda_returns(outcomes(), gamma=0.5, lam=1.0)
    np.testing.assert_allclose(returns[CHOSEN], [0.125, 0.25, 0.5, 1.0])


def test_a_truncated_completion_has_a_value_ahead():
    """The same completion is worth what the critic expects after the cut more, discounted; one
    that ended has a cut of 0."""
    (ended, _), (cut, other) = (
        lambda_returns(outcomes(cuts=cuts), gamma=0.5, lam=1.0)
        for cuts in (None, np.array([0.8, 0.0]))
    )
    np.testing.assert_allclose((cut - ended)[CHOSEN], [0.05, 0.1, 0.2, 0.4], rtol=1e-6)
    np.testing.assert_array_equal(other, 0)


def test_penalties_are_part_of_the_reward():
    penalties = [np.array([0.1, 0.0, 5.0, 0.2, 0.0]), np.zeros(2)]
    whole = outcomes(rewards=np.array([0.7, np.nan]), penalties=penalties)
    returns, _ = lambda_returns(whole, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(returns[CHOSEN], [0.7, 0.8, 0.8, 1.0], atol=1e-6)


def test_an_answer_without_actions_has_no_advantage():
    silent = outcomes(
        rewards=np.array([1.0, 2.0]), action_masks=[np.zeros(5, bool), np.zeros(2, bool)]
    )
    for found in (generalized(silent), lambda_returns(silent)):
        np.testing.assert_array_equal(np.concatenate(found), np.zeros(7))


def test_explained_variance():
    known = outcomes(rewards=np.array([1.0, 0.0]))
    assert explained_variance(VALUES, known) == pytest.approx(1)
    constant = outcomes(rewards=np.array([1.0, 0.0]), values=[np.full(5, 0.3), np.full(2, 0.3)])
    assert explained_variance(VALUES, constant) == pytest.approx(0)
    assert np.isnan(explained_variance([np.ones(5), np.ones(2)], known))


def test_an_advantage_for_one_token_alone():
    single = outcomes(action_masks=[np.array([True]), np.array([True])], values=[np.ones(1)] * 2)
    np.testing.assert_array_equal(generalized(single)[0], [0.0])


def test_without_a_critic_the_message_says_so():
    with pytest.raises(ValueError, match="use the recipe ppo"):
        generalized(outcomes(values=None))
