"""Advantages by hand and by law."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxrl.advantages import (
    batch_relative,
    centred,
    gpg,
    group_relative,
    leave_one_out,
    leave_one_out_relative,
    leave_one_out_whitened,
    max_rl,
    pass_at_k,
    pass_at_k_relative,
    zero_std_groups,
)

ESTIMATORS = [group_relative, centred, leave_one_out]
STD = np.std([1, 0, 3, 2, 0.5, 0.5], ddof=1) + 1e-6
LEFT = np.std([0, -1.5, 3.0, 1.5, 0, 0], ddof=1) + 1e-6  # of the leave-one-out advantages
NAN = float("nan")

rewards_and_groups = st.lists(
    st.tuples(st.floats(-10, 10, width=16) | st.just(NAN), st.integers(-3, 3)), max_size=20
).map(lambda pairs: tuple(np.array([p[i] for p in pairs], dtype) for i, dtype in enumerate("fi")))
quick = settings(max_examples=50, derandomize=True, deadline=None, database=None)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # Group 4: 1, 0, 2 (mean 1, unbiased std 1). Group 7: alone. Group 1: .5, .5 and unknown.
        (group_relative, [0, -1 / (1 + 1e-6), 3.0, 1 / (1 + 1e-6), 0, 0, 0]),
        (centred, [0, -1, 0, 1, 0, 0, 0]),
        (leave_one_out, [0, -1.5, 3.0, 1.5, 0, 0, 0]),
        # The others of group 4: 0 and 2, 1 and 2, 0 and 1.
        (
            leave_one_out_relative,
            [0, -1.5 / (0.5**0.5 + 1e-6), 0, 1.5 / (0.5**0.5 + 1e-6), 0, 0, 0],
        ),
        (batch_relative, [0, -1 / STD, 0, 1 / STD, 0, 0, 0]),
        (max_rl, [0, -1, 0, 1, 0, 0, 0]),
        (pass_at_k, [0, 0, 3.0, 1, 0, 0, 0]),
        (pass_at_k_relative, [0, 0, 3.0, 1 / (1 + 1e-6), 0, 0, 0]),
        # Six rewards are known, three of them in the one group whose rewards differ.
        (gpg, [0, -2, 0, 2, 0, 0, 0]),
        (
            leave_one_out_whitened,
            [*((np.array([0, -1.5, 3.0, 1.5, 0]) - 0.5) / LEFT), 0, -0.5 / LEFT],
        ),
    ],
)
def test_by_hand(estimator, expected):
    rewards, groups = np.array([1, 0, 3, 2, 0.5, NAN, 0.5]), np.array([4, 4, 7, 4, 1, 1, 1])
    result = estimator(rewards, groups)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_std_is_unbiased_and_eps_is_added():
    result = group_relative(np.array([0.0, 1.0]), np.array([0, 0]), eps=0.5)
    np.testing.assert_allclose(result, np.array([-0.5, 0.5]) / (np.sqrt(0.5) + 0.5), rtol=1e-6)


def test_leave_one_out_baseline():
    rewards = np.array([1.0, 4.0, -2.0, 7.0])
    expected = [r - np.delete(rewards, i).mean() for i, r in enumerate(rewards)]
    np.testing.assert_allclose(leave_one_out(rewards, np.zeros(4, int)), expected, rtol=1e-6)


def test_leave_one_out_statistics():
    rewards = np.array([1.0, 4.0, -2.0, 7.0, NAN])
    known = rewards[:4]
    others = [np.delete(known, i) for i in range(4)]
    expected = [(r - o.mean()) / o.std(ddof=1) for r, o in zip(known, others, strict=True)]
    found = leave_one_out_relative(rewards, np.zeros(5, int))
    np.testing.assert_allclose(found, [*expected, 0], rtol=1e-5)
    # The only right answer: the others are all equal, and the difference itself is the advantage.
    found = leave_one_out_relative(np.array([1.1, 0.1, 0.1]), np.zeros(3, int))
    np.testing.assert_allclose(found, [1, -0.5 / 0.5**0.5, -0.5 / 0.5**0.5], rtol=1e-5)
    np.testing.assert_array_equal(leave_one_out_relative(np.ones(2), np.zeros(2, int)), 0)
    # The only wrong one: rounding of the others' large rewards must not count as their std.
    found = leave_one_out_relative(np.array([-1.0, *[55.3] * 15]), np.zeros(16, int))
    np.testing.assert_allclose(found[0], -56.3, rtol=1e-6)


def test_batch_relative_bounds_almost_solved_prompts():
    rewards, groups = np.array([1.0, 0.99, 0.0, 1.0]), np.array([0, 0, 1, 1])
    found = batch_relative(rewards, groups)
    np.testing.assert_allclose(found[0] / found[3], 0.01, rtol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@quick
@given(data=rewards_and_groups, shift=st.floats(-5, 5, width=16), seed=st.integers(0, 99))
def test_laws(estimator, data, shift, seed):
    rewards, groups = data
    result = estimator(rewards, groups)
    assert np.isfinite(result).all()
    assert (result[np.isnan(rewards)] == 0).all()
    order = np.random.default_rng(seed).permutation(len(rewards))
    np.testing.assert_allclose(estimator(rewards[order], groups[order]), result[order], atol=1e-4)
    known = ~np.isnan(rewards)
    np.testing.assert_allclose(estimator(rewards[known], groups[known]), result[known], atol=1e-4)
    for group in np.unique(groups[known]):
        members = known & (groups == group)
        if members.sum() > 1:
            assert abs(result[members].sum()) < 1e-2
            shifted = estimator(np.where(members, rewards + shift, rewards), groups)
            spread = np.ptp(rewards[members])
            if spread == 0 or spread > 1e-2:  # else f32 rewards lose it to the shift
                np.testing.assert_allclose(shifted, result, rtol=1e-2, atol=1e-2)


def test_pass_at_k_rewards_the_best_alone():
    rewards, groups = np.array([-5.0, 2.0, -1.0, -2.0, 9.0]), np.array([2, 2, 1, 1, 2])
    np.testing.assert_allclose(pass_at_k(rewards, groups), [0, 0, 1, 0, 7])


def test_max_rl_weighs_hard_prompts():
    rewards, groups = np.array([1.0, 0, 0, 0, 1, 1, 1, 0]), np.repeat([0, 1], 4)
    expected = [3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1]
    np.testing.assert_allclose(max_rl(rewards, groups), expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"reward of rollout 1 is -0\.5"):
        max_rl(np.array([1.0, -0.5]), np.array([0, 0]))


def test_zero_std_groups():
    rewards = np.array([0.1, 0.1, 0.1, 1, 0, 5, NAN, 2, NAN, NAN])
    groups = np.array([0, 0, 0, 1, 1, 2, 3, 3, 4, 4])
    assert zero_std_groups(rewards, groups) == 1
    assert zero_std_groups(np.array([]), np.array([], int)) == 0
    assert np.abs(group_relative(rewards, groups)[:3]).max() < 1e-9


@pytest.mark.parametrize("estimator", [*ESTIMATORS, max_rl, pass_at_k, zero_std_groups])
def test_errors(estimator):
    with pytest.raises(ValueError, match="reward of rollout 1 is inf"):
        estimator(np.array([1.0, np.inf]), np.array([0, 0]))
    with pytest.raises(ValueError, match=r"\(2,\) and groups \(1,\)"):
        estimator(np.array([1.0, 2.0]), np.array([0]))
