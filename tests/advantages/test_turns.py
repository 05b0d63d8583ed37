"""Advantages of turns, by hand."""

import numpy as np

from jaxrl.advantages import Outcomes, centred
from jaxrl.advantages.baselines import turn_relative

MASK = np.array([True, True, False, True])  # two turns with an observation between
TURNS = [(0, 2, 0.25), (3, 4, 0.0)]


def outcomes(rewards, masks, turns, groups=None) -> Outcomes:
    return Outcomes(
        rewards=np.array(rewards),
        groups=np.array([5] * len(rewards) if groups is None else groups),
        action_masks=masks,
        turns=turns,
    )


def test_rewards_lie_where_they_were_earned():
    found = outcomes([1.25, np.nan], [MASK, MASK], [TURNS, TURNS]).token_rewards()
    assert found[0].tolist() == [0, 0.25, 0, 1.0]
    assert found[1].tolist() == [0, 0, 0, 0]


def test_turn_baseline_is_the_others_return():
    """To go: 1.25 and 0.5 from the first turn on, 1 and 0.25 from the second on; the third answer
    ends with its first turn, the fourth is not known, the fifth has no token to learn from."""
    single = np.array([True])
    masks = [MASK, MASK, single, MASK, np.array([False])]
    turns = [TURNS, TURNS, [(0, 1, 0.0)], TURNS, [(0, 1, 0.0)]]
    found = turn_relative(outcomes([1.25, 0.5, 0.25, np.nan, 9.0], masks, turns))
    first, second = (1.25 + 0.5 + 0.25) / 3, (1.0 + 0.25) / 2
    expected = [
        [1.25 - first, 1.25 - first, 0, 1.0 - second],
        [0.5 - first, 0.5 - first, 0, 0.25 - second],
        [0.25 - first],
        [0] * 4,
        [0],
    ]
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_single_turns_are_centred():
    rng = np.random.default_rng(0)
    rewards, groups = rng.normal(size=12), rng.integers(0, 3, 12)
    masks = [np.ones(n, bool) for n in rng.integers(1, 5, 12)]
    found = turn_relative(outcomes(rewards, masks, None, groups))
    for one, other in zip(found, centred(rewards, groups), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
