"""Likelihoods with a denominator of their own, and sums of objectives, by hand."""

import jax
import numpy as np
import pytest

from jaxrl.advantages import centred
from jaxrl.core.batch import earlier_actions, observed
from jaxrl.core.metrics import to_floats
from jaxrl.losses import (
    Recipe,
    dft,
    grpo,
    objective,
    observation_likelihood,
    one_sequence,
    over_sampler,
    positive_likelihood,
    product,
    reinforce,
    token_mean,
    with_terms,
    within,
)

# Two sequences of four tokens: prompt, action, output of a tool, action; the first is right.
SCORES, BATCH = one_sequence(
    advantages=[0.0, 1.0, 0.0, 1.0, 0.0, -2.0, 0.0, -2.0],
    logprobs=[0.0, -1.0, 0.0, -2.0, 0.0, -3.0, 0.0, -4.0],
    observed=[0.0, 0.0, -5.0, 0.0, 0.0, 0.0, -7.0, 0.0],
    rewards=[1.0] * 4 + [0.0] * 4,
    action_mask=[False, True, False, True] * 2,
)
BATCH = BATCH.replace(segments=np.array([[1] * 4 + [2] * 4]))


def loss(goal):
    total, metrics = jax.jit(goal.total)(SCORES, BATCH)
    return float(total / goal.denominator(BATCH)), to_floats(metrics)


def test_likelihood_is_divided_by_its_tokens():
    policy = (2 * -1 + 2 * 2) / 4
    value, metrics = loss(objective(reinforce(), token_mean) + 0.1 * positive_likelihood())
    assert value == pytest.approx(policy + 0.1 * (1 + 2) / 2)
    assert metrics["nll/positive"] == 1.5
    value, metrics = loss(objective(reinforce(), token_mean) + 0.1 * observation_likelihood())
    assert value == pytest.approx(policy + 0.1 * (5 + 7) / 2)
    assert metrics["nll/observed"] == 6.0


def test_cross_entropy_beside_the_policy_keeps_its_own_count():
    """The rejection drops sequences from the policy's loss and count, the first or both;
    cross-entropy counts their tokens all the same."""
    rejected = within(product(over_sampler), high=2)
    goal = with_terms(
        Recipe(objective(reinforce(), token_mean), centred), rejection=rejected, nll=0.1
    ).objective
    for dropped, left, policy in ((4, 2, (2 + 2) / 2), (8, 0, 0.0)):
        batch = BATCH.replace(sampler_logprobs=SCORES.logprobs.at[:, :dropped].add(-1.0))
        scores, _ = goal.survey(SCORES, batch)
        denominator = float(goal.denominators(batch, scores.whole)[0])
        total, metrics = jax.jit(goal.total)(scores, batch)
        assert denominator == left
        value = float(total) / (denominator or 1.0)
        assert value == pytest.approx(policy + 0.1 * (1 + 2 + 3 + 4) / 4)
        assert to_floats(metrics)["nll/completion"] == 2.5


def test_dynamic_fine_tuning_weights_a_token_by_its_probability():
    with jax.enable_x64(True):
        scores, batch = one_sequence(advantages=[0.0] * 3, logprobs=[-0.1, -1.0, -4.0])
        value = dft().apply(scores, batch)[0]
        gradient = jax.grad(lambda lp: dft().apply(scores.replace(logprobs=lp), batch)[0].sum())(
            scores.logprobs
        )
    logp = np.array([-0.1, -1.0, -4.0])
    np.testing.assert_allclose(value[0], -np.exp(logp) * logp, rtol=1e-6)
    np.testing.assert_allclose(gradient[0], -np.exp(logp), rtol=1e-6)


def test_likelihood_is_independent_of_aggregation():
    plain = with_terms(grpo())
    for aggregation in (None, token_mean):
        parts = [
            loss(with_terms(plain, aggregation=aggregation, **terms).objective)[0]
            for terms in ({}, {"positive_nll": 0.1}, {"positive_nll": 0.1, "observation_nll": 0.2})
        ]
        assert np.diff(parts) == pytest.approx([0.15, 1.2])


def test_objectives_add_and_scale():
    first, second = objective(reinforce(), token_mean), positive_likelihood()
    values = [loss(goal)[0] for goal in (first, second, 2 * (first + 0.5 * second), first - second)]
    assert values[2] == pytest.approx(2 * values[0] + values[1])
    assert values[3] == pytest.approx(values[0] - values[1])
    assert repr(2 * (first + second)) == (
        "2 * objective(reinforce(), token_mean) + 2 * positive_likelihood(0.0)"
    )


def test_likelihood_without_tokens_is_zero():
    goal = objective(reinforce(), token_mean) + positive_likelihood(threshold=2.0)
    total = jax.jit(
        jax.value_and_grad(lambda lp: goal.total(SCORES.replace(logprobs=lp), BATCH)[0])
    )
    value, gradient = total(SCORES.logprobs)
    assert value == 2.0
    assert np.isfinite(gradient).all()
    with pytest.raises(ValueError, match=r"batch\.rewards"):
        positive_likelihood().total(SCORES, BATCH.replace(rewards=None))


def test_observations_are_no_actions():
    segments = np.array([[1, 1, 1, 1, 0, 2, 2, 2, 2, 0]])
    chosen = np.array([[0, 1, 0, 1, 0, 0, 0, 1, 0, 0]], bool)
    _, batch = one_sequence(advantages=[0.0] * 10, logprobs=-1.0)
    batch = batch.replace(segments=segments, action_mask=chosen)
    np.testing.assert_array_equal(earlier_actions(batch), [[0, 0, 1, 1, 0, 0, 0, 0, 1, 0]])
    np.testing.assert_array_equal(observed(batch), [[0, 0, 1, 0, 0, 0, 0, 0, 1, 0]])
