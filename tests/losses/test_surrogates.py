"""Policy terms by hand: values on every branch, and the reported shares."""

import math

import jax
import numpy as np
import pytest

from jaxrl.core.metrics import to_floats
from jaxrl.losses import (
    clipped,
    geometric_clipped,
    likelihood,
    one_sequence,
    over_sampler,
    product,
    reinforce,
    soft_gated,
    unclipped,
)

RATIOS = np.array([0.5, 0.9, 1.1, 1.5, 4.0])


BOUNDED = geometric_clipped(over_sampler, low=math.log(1.1), high=math.log(1.1) + 1e-9)


def applied(term, advantage, *, action_mask=True):
    scores, batch = one_sequence(
        advantages=[advantage] * 5, logprobs=np.log(RATIOS), sampler=0.0, action_mask=action_mask
    )
    value, metrics = jax.jit(term.apply)(scores, batch)
    return value[0], to_floats(metrics)


@pytest.mark.parametrize(
    ("term", "advantage", "expected"),
    [
        (reinforce(), 2.0, [-2.0] * 5),
        (unclipped(over_sampler), 2.0, [-1.0, -1.8, -2.2, -3.0, -8.0]),
        (clipped(over_sampler), 2.0, [-1.0, -1.8, -2.2, -2.4, -2.4]),
        (clipped(over_sampler), -2.0, [1.6, 1.8, 2.2, 3.0, 8.0]),
        (clipped(over_sampler, low=0.05, high=0.28), 1.0, [-0.5, -0.9, -1.1, -1.28, -1.28]),
        (clipped(over_sampler, low=0.05, high=0.28), -1.0, [0.95, 0.95, 1.1, 1.5, 4.0]),
        (clipped(over_sampler, dual=3.0), -2.0, [1.6, 1.8, 2.2, 3.0, 6.0]),
        (clipped(over_sampler, dual=3.0), 2.0, [-1.0, -1.8, -2.2, -2.4, -2.4]),
        (clipped(over_sampler, cap=1.3), -2.0, [1.6, 1.8, 2.2, 2.6, 2.6]),
        (clipped(over_sampler, low=1.0, high=math.inf), 2.0, [-1.0, -1.8, -2.2, -3.0, -8.0]),
        (likelihood(), 2.0, -2.0 * np.log(RATIOS)),
        (soft_gated(over_sampler), 2.0, -8.0 / (1 + np.exp(1 - RATIOS))),
        (soft_gated(over_sampler, negative=2.0), -1.0, 2.0 / (1 + np.exp(2 * (1 - RATIOS)))),
        # Bounded by 1.1 from above where A > 0, by 1 / 1.1 from below where A < 0.
        (BOUNDED, 2.0, [-2.0 * (0.5 * 0.9 * 1.1 * 1.1 * 1.1) ** 0.2] * 5),
        (BOUNDED, -2.0, [2.0 * (1 / 1.1 * 1 / 1.1 * 1.1 * 1.5 * 4.0) ** 0.2] * 5),
    ],
)
def test_value(term, advantage, expected):
    np.testing.assert_allclose(applied(term, advantage)[0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (1.0, {"clip/low": 0.0, "clip/high": 0.4, "clip/dual": 0.0, "clip/cap": 0.0}),
        (-1.0, {"clip/low": 0.2, "clip/high": 0.0, "clip/dual": 0.2, "clip/cap": 0.4}),
        (0.0, {"clip/low": 0.0, "clip/high": 0.0, "clip/dual": 0.0, "clip/cap": 0.0}),
    ],
)
def test_clip_shares_know_the_sign(advantage, expected):
    _, metrics = applied(clipped(over_sampler, dual=3.0, cap=1.3), advantage)
    assert {k: v for k, v in metrics.items() if k.startswith("clip/")} == pytest.approx(expected)


def test_metrics_are_means_over_action_tokens():
    _, metrics = applied(clipped(over_sampler), 1.0, action_mask=[1, 0, 0, 1, 0])
    kl = ((0.5 - 1 - math.log(0.5)) + (1.5 - 1 - math.log(1.5))) / 2
    expected = {
        "clip/low": 0.0,
        "clip/high": 0.5,
        "ratio/mean": 1.0,
        "ratio/kl": kl,
        "ratio/missing": 0.0,
    }
    assert metrics == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"low": -0.1}, "low=-0.1"),
        ({"low": 1.5}, "low=1.5"),
        ({"high": -0.1}, "high=-0.1"),
        ({"dual": 1.1}, "dual=1.1 must exceed"),
        ({"cap": 1.0}, "cap=1.0 must exceed"),
    ],
)
def test_impossible_clips_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        clipped(over_sampler, **arguments)


@pytest.mark.parametrize(("advantage", "low", "high"), [(1.0, 0.0, 0.4), (-1.0, 0.4, 0.0)])
def test_geometric_clip_shares(advantage, low, high):
    _, metrics = applied(BOUNDED, advantage)
    assert (metrics["clip/low"], metrics["clip/high"]) == pytest.approx((low, high))


def test_impossible_gates_and_bounds_are_refused():
    with pytest.raises(ValueError, match="negative=0"):
        soft_gated(over_sampler, negative=0.0)
    with pytest.raises(ValueError, match="low=-1"):
        geometric_clipped(over_sampler, low=-1.0)
    with pytest.raises(ValueError, match="ratio of each token"):
        geometric_clipped(product(over_sampler))
