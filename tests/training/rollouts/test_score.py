"""The metrics of scored rollouts, counted by hand."""

import math

import pytest

from jaxrl.core import given_rollout
from jaxrl.training.rollouts.score import reward_metrics


def groups(*rewards):
    made = given_rollout([1], [2])
    return [
        made._replace(group=group, reward=reward)
        for group, some in enumerate(rewards)
        for reward in some
    ]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        (((1, 1), (0, 1), (0, 0), (0, 0)), (1, 1, 2)),
        (((1, math.nan), (math.nan, math.nan), (0, 1)), (1, 1, 0)),  # a failed reward is unknown
        (((1, 0.5), (0, 0)), None),
        (((1, -1), (0, 0)), None),
    ],
)
def test_groups_are_right_mixed_or_wrong_where_rewards_are_0_or_1(rewards, expected):
    numbers = reward_metrics(groups(*rewards), weights={"reward": 1.0})
    found = [numbers.get(f"groups/{kind}") for kind in ("right", "mixed", "wrong")]
    assert found == ([None] * 3 if expected is None else list(expected))
