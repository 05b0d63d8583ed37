"""Aggregations and recipes by hand on one small batch."""

import jax
import numpy as np
import pytest

from jaxrl import advantages
from jaxrl.core.batch import Rollout
from jaxrl.core.packing import pack
from jaxrl.losses import (
    Scores,
    dapo,
    dr_grpo,
    fixed_length,
    grpo,
    objective,
    over_anchor,
    reinforce,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    token_mean,
    token_sum,
    with_terms,
)

# Three answers of 2, 4 and 1 tokens, of which the policy chose 2, 3 and 0; -advantage is the loss.
LENGTHS = (2, 4, 1)
MASKS = ([True, True], [True, False, True, True], [False])
ADVANTAGES = (1.0, -3.0, 100.0)


def batch(*, log_ratio=0.0):
    rollouts = [
        Rollout(
            prompt=np.array([7]),
            completion=np.arange(n),
            logprobs=np.full(n, -1.0 - log_ratio),
            action_mask=np.array(mask),
            version=np.zeros(n, np.int32),
            group=0,
        )
        for n, mask in zip(LENGTHS, MASKS, strict=True)
    ]
    packed = pack(rollouts, ADVANTAGES, rows=[[0, 1], [2]], row_length=9)
    return jax.tree.map(jax.numpy.asarray, packed)


def loss(reduced, *, log_ratio=0.0, **scores):
    data = batch(log_ratio=log_ratio)
    full = {
        k: np.full(data.tokens.shape, v, np.float32)
        for k, v in {"logprobs": -1.0, **scores}.items()
    }
    reduce = jax.jit(lambda scores: (reduced.total(scores, data)[0], reduced.denominator(data)))
    total, denominator = reduce(Scores(**full))
    return float(total) / float(denominator)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (token_mean, (2 * -1 + 3 * 3) / 5),
        (sequence_mean_token_mean, (-1 + 3) / 2),
        (sequence_mean_token_sum, (2 * -1 + 3 * 3) / 2),
        (fixed_length(10), (2 * -1 + 3 * 3) / (2 * 10)),
        (token_sum, 2 * -1 + 3 * 3),
    ],
)
def test_aggregation(aggregation, expected):
    assert loss(objective(reinforce(), aggregation)) == pytest.approx(expected)


def test_fixed_length_is_positive():
    with pytest.raises(ValueError, match="max_length=0"):
        fixed_length(0)


@pytest.mark.parametrize(
    ("recipe", "expected"),  # ratio 1.5: clipped for the first answer, free for the second
    [
        (grpo(), (-1.2 + 4.5) / 2),
        (grpo(clip_high=0.4, dual_clip=1.45), (-1.4 + 3 * 1.45) / 2),
        (dr_grpo(max_length=8), (2 * -1.2 + 3 * 4.5) / 16),
        (dapo(), (2 * -1.28 + 3 * 4.5) / 5),
    ],
)
def test_recipe(recipe, expected):
    assert loss(recipe.objective, log_ratio=np.log(1.5)) == pytest.approx(expected)
    assert recipe.objective.needs == frozenset()


def test_regularizers_enter_once():
    recipe = with_terms(grpo(ratio=over_anchor), kl=0.1, entropy=0.01)
    assert recipe.objective.needs == {"anchor", "reference", "entropy"}
    value = loss(recipe.objective, anchor=-1.0, reference=-1.5, entropy=2.0)
    assert value == pytest.approx((-1 + 3) / 2 + 0.1 * (np.exp(-0.5) + 0.5 - 1) - 0.01 * 2.0)


def test_recipes_name_their_advantages():
    assert grpo().advantages is advantages.group_relative
    assert dapo().advantages is advantages.group_relative
    assert dr_grpo(max_length=8).advantages is advantages.centred
