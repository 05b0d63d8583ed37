"""Corrections by hand, and that no change of policy is counted twice."""

import jax
import numpy as np
import pytest

from jaxrl.core.metrics import to_floats
from jaxrl.losses import (
    anchor_over_sampler,
    clipped,
    gamma_shaped,
    kl_penalty,
    masked,
    normalized,
    objective,
    one_sequence,
    over_anchor,
    over_sampler,
    product,
    reinforce,
    reweight,
    sequence,
    shadowed,
    token_mean,
    truncated,
    unclipped,
)
from jaxrl.losses.algebra import Weights
from jaxrl.losses.from_config import PARTS
from tests.losses.cases import TERMS

RATIOS = np.array([0.4, 0.9, 1.5, 4.0, np.nan])  # anchor / sampler; the last one is unknown


def case(**changes):
    scores = {"logprobs": -2.0, "anchor": -2.0, "sampler": -2.0 - np.log(RATIOS)}
    return one_sequence(advantages=[1.0] * 5, **scores | changes)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (truncated(anchor_over_sampler, high=2.0), [0.4, 0.9, 1.5, 2.0, 1.0]),
        (truncated(anchor_over_sampler, low=0.5, high=1.2), [0.5, 0.9, 1.2, 1.2, 1.0]),
        (masked(anchor_over_sampler, low=0.5, high=2.0), [0.0, 0.9, 1.5, 0.0, 1.0]),
        (truncated(product(anchor_over_sampler), high=2.0), [2.0] * 5),
        (truncated(product(anchor_over_sampler), high=3.0), [0.4 * 0.9 * 1.5 * 4.0] * 5),
        (masked(product(anchor_over_sampler), high=10.0), [0.4 * 0.9 * 1.5 * 4.0] * 5),
        (masked(product(anchor_over_sampler), high=2.0), [0.0] * 5),
    ],
)
def test_weights_multiply_the_loss(weights, expected):
    scores, batch = case()
    term = unclipped(over_anchor)
    factors, weighted, plain = (
        jax.jit(loss.apply)(scores, batch)[0] for loss in (weights, reweight(term, weights), term)
    )
    np.testing.assert_allclose(factors[0], expected, rtol=1e-5)
    np.testing.assert_allclose(weighted, plain * np.array([expected]), rtol=1e-5)


@pytest.mark.parametrize("name", ["token_tis", "sequence_tis"])
def test_weights_divided_by_their_mean(name):
    """In sequences of one token and of three: of tokens each counts once, of sequences each."""
    scores, batch = case()
    mask = np.array([[True] * 4 + [False]])
    batch = batch.replace(segments=np.array([[1, 2, 2, 2, 0]]), action_mask=mask)
    if name == "token_tis":
        expected = np.array([0.4, 0.9, 1.5, 2.0])
        expected = expected / expected.mean()
    else:
        expected = np.array([0.4, 2.0, 2.0, 2.0]) / np.mean([0.4, 2.0])
    weights = PARTS[Weights][f"{name}_normalized"]
    goal = objective(weights * unclipped(over_anchor), token_mean)
    scores, metrics = jax.jit(goal.survey)(scores, batch)
    (found,) = scores.whole.values()
    np.testing.assert_allclose(found[0, :4], expected, rtol=1e-5)
    assert metrics["correction/mean"].value > 1  # before the division
    np.testing.assert_allclose(goal.total(scores, batch)[0], -expected.sum(), rtol=1e-5)


def test_weights_of_nothing_are_not_divided():
    scores, batch = case()
    goal = objective(
        normalized(masked(product(anchor_over_sampler), high=2.0), token_mean) * reinforce(),
        token_mean,
    )
    scores, _ = goal.survey(scores, batch)
    assert float(goal.total(scores, batch)[0]) == 0


def test_weights_that_are_no_numbers_are_not_taken_for_none():
    """A loss of 0 has a finite gradient: the step would count as taken."""
    scores, batch = case(anchor=np.array([-2.0, np.nan, -2.0, -2.0, -2.0]))
    weights = normalized(truncated(anchor_over_sampler, high=2.0), token_mean)
    (found,) = objective(weights * reinforce(), token_mean).survey(scores, batch)[0].whole.values()
    assert np.isnan(found).all()


@pytest.mark.parametrize(("sign", "k", "lam"), [(1.0, 2.0, 3.0), (-1.0, 3.0, 2.0)])
def test_gamma_weights(sign, k, lam):
    scores, batch = case()
    batch = batch.replace(advantages=sign * batch.advantages)
    for ratio, w in ((anchor_over_sampler, RATIOS), (product(anchor_over_sampler), [2.16] * 5)):
        w = np.nan_to_num(w, nan=1.0)
        factors, metrics = jax.jit(gamma_shaped(ratio).apply)(scores, batch)
        expected = np.exp(lam) * w**k * np.exp(-lam * w)
        np.testing.assert_allclose(factors[0], expected, rtol=1e-5)
        assert to_floats(metrics)["correction/mean"] == pytest.approx(expected.mean(), rel=1e-5)
    with pytest.raises(ValueError, match="k and lam must be > 0"):
        gamma_shaped(over_sampler, positive=(0.0, 1.0))


@pytest.mark.parametrize(("make", "total"), [(truncated, 5.9), (masked, 3.4)])
def test_metrics(make, total):
    weights = make(anchor_over_sampler, low=0.5, high=2.0)
    _, metrics = jax.jit(weights.apply)(*case())
    expected = {"correction/mean": total / 5, "correction/outside": 0.4, "correction/missing": 0.2}
    assert to_floats(metrics) == pytest.approx(expected, rel=1e-5)


def test_no_gradient_flows_through_the_weights():
    scores, batch = case()
    term = reweight(reinforce(), truncated(over_sampler, high=2.0))
    gradient = jax.jit(jax.grad(lambda lp: term.apply(scores.replace(logprobs=lp), batch)[0].sum()))
    np.testing.assert_allclose(
        gradient(scores.logprobs)[0], -np.array([0.4, 0.9, 1.5, 2.0, 1.0]), rtol=1e-5
    )


@pytest.mark.parametrize("name", ["clipped over anchor", "product", "reinforce"])
def test_weights_of_one_change_nothing(name):
    scores, batch = case(sampler=[-2.0, -2.0, np.nan, -2.0, -2.0], logprobs=-1.9)
    for make in (truncated, masked):
        corrected = reweight(TERMS[name], make(product(anchor_over_sampler), high=2.0))
        value, metrics = jax.jit(TERMS[name].apply)(scores, batch)
        same, more = jax.jit(corrected.apply)(scores, batch)
        np.testing.assert_array_equal(value, same)
        assert metrics.keys() < more.keys()


@pytest.mark.parametrize("level", [lambda ratio: ratio, product, sequence])
@pytest.mark.parametrize(
    ("ratio", "correction"),
    [
        (over_sampler, anchor_over_sampler),
        (over_sampler, over_sampler),
        (shadowed, anchor_over_sampler),
        (over_anchor, over_sampler),
    ],
)
def test_counting_a_shift_twice_is_refused(level, ratio, correction):
    with pytest.raises(ValueError, match="count it again"):
        reweight(clipped(level(ratio)), truncated(level(correction), high=2.0))


def test_double_correction_is_refused():
    weights = truncated(anchor_over_sampler, high=2.0)
    with pytest.raises(ValueError, match="count it again"):
        reweight(0.5 * clipped(over_sampler) + kl_penalty(), weights)
    with pytest.raises(ValueError, match="mismatch"):
        reweight(reweight(clipped(over_anchor), weights), weights)


@pytest.mark.parametrize(
    "bounds", [{"high": 1.0}, {"low": 1.0, "high": 2.0}, {"low": -1.0, "high": 2.0}]
)
def test_bounds_hold_one(bounds):
    for make in (truncated, masked):
        with pytest.raises(ValueError, match="0 <= low < 1 < high"):
            make(over_sampler, **bounds)
