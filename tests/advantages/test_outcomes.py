"""Estimators that see whole outcomes, by hand; how an estimator is called."""

import dataclasses
import functools

import numpy as np
import pytest

from jaxrl import advantages
from jaxrl.advantages import Outcomes, estimate, estimators

NAN = float("nan")


def outcomes(
    rewards=(1.0, 0.0, 2.0, 4.0, NAN), groups=(7, 7, 3, 3, 3), lengths=(1, 3, 2, 2, 5), **more
):
    return Outcomes(
        rewards=np.array(rewards),
        groups=np.array(groups),
        action_masks=[np.ones(n, bool) for n in lengths],
        **more,
    )


def whitened(values, weights):
    values, weights = np.array(values), np.array(weights)
    mean = np.sum(weights * values) / np.sum(weights)
    variance = np.sum(weights * (values - mean) ** 2) / (np.sum(weights) - 1)
    return (values - mean) / np.sqrt(variance)


def test_opo_weighs_by_length():
    # Means by length: (1 x 1 + 3 x 0) / 4 and (2 x 2 + 2 x 4) / 4.
    np.testing.assert_allclose(estimate(advantages.opo, outcomes()), [0.75, -0.25, -1, 1, 0])


def test_optimal_token_baseline_by_hand():
    """Group 7 has answers of three and of two chosen tokens, a tool's output within the first, and
    one that failed; group 3 has a single answer."""
    masks = [np.array([1, 1, 0, 1], bool), np.ones(2, bool), np.ones(2, bool), np.ones(2, bool)]
    energies = [np.array([0.2, 0.4, 9.0, 0.6]), np.array([0.8, 0.1]), np.full(2, 5.0), np.ones(2)]
    penalties = [np.array([0.1, 0.0, 9.0, 0.0]), np.zeros(2), np.zeros(2), np.zeros(2)]
    given = Outcomes(
        rewards=np.array([0.9, 0.0, NAN, 3.0]),
        groups=np.array([7, 7, 7, 3]),
        action_masks=masks,
        penalties=penalties,
        energies=lambda: energies,
    )
    found = estimate(advantages.optimal_token_baseline, given)
    # Rewards to come are .9, 1, 1 and 0, 0; energies so far .2, .6, 1.2 and .8, .9.
    first, second = 0.9 * 0.2 / (0.2 + 0.8), 1.0 * 0.6 / (0.6 + 0.9)
    np.testing.assert_allclose(found[0], [0.9 - first, 1.0 - second, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(found[1], [-first, -second], rtol=1e-6)
    np.testing.assert_array_equal(found[2], [0, 0])
    np.testing.assert_array_equal(found[3], [3.0, 3.0])
    with pytest.raises(ValueError, match="energies"):
        estimate(advantages.optimal_token_baseline, outcomes())


def test_remax_compares_with_the_greedy_answer():
    greedy = np.array([0.5, 0.5, 1.0, 1.0, 1.0])
    found = estimate(advantages.remax, outcomes(greedy=lambda: greedy))
    np.testing.assert_allclose(found, [0.5, -0.5, 1.0, 3.0, 0.0])
    with pytest.raises(ValueError, match="greedy"):
        estimate(advantages.remax, outcomes())


def test_reinforce_pp_baseline_whitens_over_tokens():
    centred = [0.5, -0.5, -1.0, 1.0]
    expected = [*whitened(centred, [1, 3, 2, 2]), 0.0]
    np.testing.assert_allclose(
        estimate(advantages.reinforce_pp_baseline, outcomes()), expected, rtol=1e-6
    )
    alone = outcomes(rewards=(1.0, 3.0), groups=(0, 1), lengths=(1, 1))
    np.testing.assert_allclose(
        estimate(advantages.reinforce_pp_baseline, alone), [-np.sqrt(0.5), np.sqrt(0.5)], rtol=1e-6
    )


def test_reinforce_pp_discounts_future_rewards():
    penalties = [np.array([0.0]), np.array([0.1, 0.2, 0.4]), np.zeros(2), np.zeros(2), np.zeros(5)]
    case = outcomes(rewards=(1.0, 1.3, 2.0, 4.0, NAN), penalties=penalties)
    # The second answer earned 2 and paid .7: 1.3 in all, of which 1.6 come at its last token.
    tokens = case.token_rewards()
    np.testing.assert_allclose(tokens[1], [-0.1, -0.2, 1.6])
    assert tokens[1].sum() == pytest.approx(1.3)
    np.testing.assert_array_equal(tokens[4], np.zeros(5))
    found = estimate(functools.partial(advantages.reinforce_pp, gamma=0.5), case)
    third = 1.6
    second = -0.2 + 0.5 * third
    returns = [1.0, -0.1 + 0.5 * second, second, third, 1.0, 2.0, 2.0, 4.0]
    np.testing.assert_allclose(np.concatenate(found[:4]), whitened(returns, np.ones(8)), rtol=1e-5)
    np.testing.assert_array_equal(found[4], np.zeros(5))
    assert [len(f) for f in found] == [1, 3, 2, 2, 5]


def test_masked_tokens_are_ignored():
    mask = np.array([True, False, True])
    case = Outcomes(
        rewards=np.array([2.0, -1.0]),
        groups=np.array([0, 0]),
        action_masks=[mask, np.ones(2, bool)],
        penalties=[np.array([0.5, 9.0, 0.25]), np.zeros(2)],
    )
    rewards = case.token_rewards()[0]
    np.testing.assert_allclose(rewards, [-0.5, 0.0, 2.5])
    found = estimate(advantages.reinforce_pp, case)
    assert found[0][1] == 0
    short = Outcomes(
        rewards=case.rewards,
        groups=case.groups,
        action_masks=[np.ones(2, bool)] * 2,
        penalties=[np.array([0.5, 0.25]), np.zeros(2)],
    )
    np.testing.assert_allclose(found[0][mask], estimate(advantages.reinforce_pp, short)[0])


def test_gdpo_makes_each_component_relative_first():
    """A component of a hundred times the size counts no more than another of its weight."""
    right, brief = np.array([1.0, 0.0, 1.0, 0.0]), np.array([300.0, 200.0, 100.0, 0.0])
    case = outcomes(
        rewards=right + 2 * brief,
        groups=(0, 0, 1, 1),
        lengths=(1,) * 4,
        components={"right": right, "brief": brief},
        weights={"right": 1.0, "brief": 2.0},
    )
    step = np.sqrt(0.5)  # both components are +-.707 in groups of two
    total = np.array([3 * step, -3 * step, 3 * step, -3 * step])
    np.testing.assert_allclose(
        estimate(advantages.gdpo, case), whitened(total, np.ones(4)), rtol=1e-4
    )
    with pytest.raises(ValueError, match=r"outcomes\.components is empty"):
        estimate(advantages.gdpo, outcomes())
    paid = dataclasses.replace(case, penalties=[np.array([0.1])] * 4)
    with pytest.raises(ValueError, match=r"use loss\.kl"):
        estimate(advantages.gdpo, paid)


@pytest.mark.parametrize("name", estimators.__all__)
def test_what_every_estimator_makes_of_hard_cases(name):
    """Groups of one, equal rewards, unknown rewards, answers without a token: finite, and nothing
    for what is unknown; the order of the answers does not matter."""
    case = outcomes(
        rewards=(1.0, 0.5, 0.5, NAN, 0.0, 0.0, NAN),
        groups=(0, 1, 1, 1, 2, 2, 5),
        lengths=(0, 2, 1, 3, 1, 1, 2),
        greedy=lambda: np.zeros(7),
        energies=lambda: [np.linspace(0.1, i, n) for i, n in enumerate((0, 2, 1, 3, 1, 1, 2))],
        components={"one": np.array([1.0, 0.5, 0.5, NAN, 0.0, 0.0, NAN])},
        weights={"one": 1.0},
    )
    estimator = getattr(estimators, name)
    found = [np.ravel(a) for a in estimate(estimator, case)]
    assert np.isfinite(np.concatenate(found)).all()
    assert all(a.dtype == np.float32 for a in found)
    assert not found[3].any()
    assert not found[6].any()
    order = np.array([4, 2, 6, 0, 1, 5, 3])
    turned = Outcomes(
        rewards=case.rewards[order],
        groups=case.groups[order],
        action_masks=[case.action_masks[i] for i in order],
        greedy=case.greedy,
        energies=lambda: [case.energies()[i] for i in order],
        components={"one": case.components["one"][order]},
        weights=case.weights,
    )
    for i, place in enumerate(order):
        np.testing.assert_allclose(
            np.ravel(estimate(estimator, turned)[i]), found[place], rtol=1e-5, atol=1e-7
        )


def test_estimators_are_called_by_what_they_take():
    case = outcomes()
    np.testing.assert_array_equal(estimate(lambda rewards, groups: groups, case), case.groups)
    np.testing.assert_array_equal(estimate(lambda given: given.lengths, case), [1, 3, 2, 2, 5])
    # A list of numbers is as good as an array, also where an episode has several sequences.
    branched = outcomes((0.0, 1.0, 0.0), (7, 7, 7), (2, 1, 1), episodes=np.array([0, 0, 1]))
    found = estimate(lambda rewards, groups: rewards.tolist(), branched)
    np.testing.assert_array_equal(found, [1, 1, 0])
    with pytest.raises(ValueError, match="needs 3 arguments"):
        estimate(lambda a, b, c: a, case)
    with pytest.raises(ValueError, match="returned 2 advantages for 5"):
        estimate(lambda rewards, groups: rewards[:2], case)
    with pytest.raises(ValueError, match="returned 1 advantages for the 3 tokens of completion 1"):
        estimate(lambda given: [np.ones(1)] * 5, case)  # not broadcast
