"""Generalized advantage estimation by hand and by law."""

import numpy as np
import pytest

from jaxrl.advantages import gae

REWARDS, VALUES = np.array([0.0, 0.0, 0.0, 1.0]), np.array([0.5, 0.6, 0.7, 0.8])
EVERY = np.ones(4, bool)


def test_a_worked_example():
    advantages, returns = gae(REWARDS, VALUES, EVERY, gamma=0.99, lam=0.95)
    assert advantages.dtype == returns.dtype == np.float32
    np.testing.assert_allclose(advantages, [0.4292, 0.3564, 0.2801, 0.2], atol=5e-5)
    np.testing.assert_allclose(returns, advantages + VALUES, rtol=1e-6)


@pytest.mark.parametrize(
    ("lam", "expected"),
    [
        (0.0, [1.094, 0.093, 1.092]),
        (0.95, [2.147384, 1.120026, 1.092]),
        (1.0, [1 + 0.9801 + 0.970299 * 0.8 - 0.5, 0.99 + 0.9801 * 0.8 - 0.6, 1.092]),
    ],
)
def test_a_worked_example_that_was_cut(lam, expected):
    """Values of T + 1 tokens, and no token is the last of an episode."""
    rewards, values = np.array([1.0, 0.0, 1.0]), np.array([0.5, 0.6, 0.7])
    found, returns = gae(rewards, values, np.ones(3, bool), gamma=0.99, lam=lam, cut=0.8)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(returns, found + values, rtol=1e-6)


def test_cut_anywhere_the_surprises_before_it_are_the_same():
    """A cut with the true value ahead is no surprise: lam = 0 sees a token and the next value."""
    whole, _ = gae(REWARDS, VALUES, EVERY, gamma=0.99, lam=0.0)
    for end in range(1, 4):
        part = slice(0, end)
        found, _ = gae(
            REWARDS[part], VALUES[part], EVERY[part], gamma=0.99, lam=0.0, cut=VALUES[end]
        )
        np.testing.assert_array_equal(found, whole[part])


def test_lambda_of_zero_and_one():
    surprises, _ = gae(REWARDS, VALUES, EVERY, gamma=0.99, lam=0.0)
    np.testing.assert_allclose(surprises, [0.094, 0.093, 0.092, 0.2], rtol=1e-6)
    _, returns = gae(REWARDS, VALUES, EVERY, gamma=0.9, lam=1.0)
    np.testing.assert_allclose(returns, [0.9**3, 0.9**2, 0.9, 1.0], rtol=1e-6)


def test_masked_tokens_are_ignored():
    mask = np.array([True, False, True, True, False, False, True, False])
    rewards, values = np.full(8, np.nan), np.full(8, np.nan)
    rewards[mask], values[mask] = REWARDS, VALUES
    for found, expected in zip(
        gae(rewards, values, mask, gamma=0.99, lam=0.95),
        gae(REWARDS, VALUES, EVERY, gamma=0.99, lam=0.95),
        strict=True,
    ):
        np.testing.assert_array_equal(found[mask], expected)
        np.testing.assert_array_equal(found[~mask], 0)


@pytest.mark.parametrize("length", [0, 3])
def test_nothing_chosen(length):
    advantages, returns = gae(
        np.ones(length), np.ones(length), np.zeros(length, bool), gamma=1.0, lam=1.0
    )
    np.testing.assert_array_equal(advantages, np.zeros(length))
    np.testing.assert_array_equal(returns, np.zeros(length))


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"values \(3,\)"):
        gae(REWARDS, VALUES[:3], EVERY, gamma=1.0, lam=1.0)
