"""Ratios by hand, and what a token without a sampler log-prob counts as."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.metrics import to_floats
from jaxrl.losses import (
    anchor_over_sampler,
    geometric,
    on_policy,
    one_sequence,
    over_anchor,
    over_sampler,
    product,
    reinforce,
    sequence,
    shadowed,
    unclipped,
)

SCORES = {
    "logprobs": [-1.0, -2.0, -3.0],
    "anchor": [-1.1, -1.9, -3.0],
    "shadow": [-1.05, -2.2, -3.1],
    "sampler": [-1.2, -1.7, np.nan],
}


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (on_policy, [0.0, 0.0, 0.0]),
        (over_anchor, [0.1, -0.1, 0.0]),
        (over_sampler, [0.2, -0.3, 0.0]),
        (anchor_over_sampler, [0.1, -0.2, 0.0]),
        (shadowed, [0.15, -0.5, 0.0]),
        (product(over_sampler), [-0.1] * 3),
        (geometric(over_sampler), [-0.1 / 3] * 3),
        (sequence(over_sampler), [-0.1 / 3] * 3),
    ],
)
def test_log_ratio_and_value(ratio, expected):
    scores, batch = one_sequence(advantages=[1.0] * 3, **SCORES)
    log, value = jax.jit(lambda s: (ratio.log(s, batch), ratio.value(s, batch)))(scores)
    np.testing.assert_allclose(log[0], expected, atol=1e-6)
    np.testing.assert_allclose(value[0], np.exp(expected), rtol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (on_policy, np.eye(3)),
        (over_anchor, np.eye(3)),
        (over_sampler, np.eye(3)),  # the token without a sampler log-prob learns like the others
        (shadowed, np.eye(3)),
        (anchor_over_sampler, np.zeros((3, 3))),
        (product(over_sampler), np.ones((3, 3))),
        (geometric(over_sampler), np.full((3, 3), 1 / 3)),
        (sequence(over_sampler), np.eye(3)),
    ],
)
def test_gradient_of_the_log_ratio(ratio, expected):
    scores, batch = one_sequence(advantages=[1.0] * 3, **SCORES)
    jacobian = jax.jit(jax.jacobian(lambda lp: ratio.log(scores.replace(logprobs=lp), batch)))
    np.testing.assert_allclose(jacobian(scores.logprobs)[0, :, 0], expected, rtol=1e-6)


def test_sequence_levels_skip_masked_tokens():
    scores, batch = one_sequence(advantages=[1.0] * 3, action_mask=[True, False, True], **SCORES)
    for ratio, expected in ((product(over_anchor), 0.1), (geometric(over_anchor), 0.05)):
        np.testing.assert_allclose(jax.jit(ratio.log)(scores, batch), [[expected] * 3], atol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "logprobs", "bound"),
    [
        (over_sampler, [100.0], 20.0),
        (over_sampler, [-100.0], -20.0),
        (product(over_sampler), [1.0] * 40, 20.0),
        (sequence(over_sampler), [15.0, 15.0], 10.0),
    ],
)
def test_log_ratios_are_clamped_before_exp(ratio, logprobs, bound):
    scores, batch = one_sequence(advantages=[1.0] * len(logprobs), logprobs=logprobs, sampler=0.0)
    value = jax.jit(ratio.value)(scores, batch)
    np.testing.assert_allclose(value, np.exp(np.full((1, len(logprobs)), bound)), rtol=1e-6)


def test_half_precision_log_probs_subtract_in_f32():
    scores, batch = one_sequence(advantages=[1.0], logprobs=[-1.0], sampler=[-1.001])
    scores = scores.replace(logprobs=scores.logprobs.astype(jnp.bfloat16))
    log = jax.jit(over_sampler.log)(scores, batch)
    assert log.dtype == jnp.float32
    np.testing.assert_allclose(log, [[0.001]], rtol=1e-3)


def test_missing_sampler_log_probs_are_counted():
    case = one_sequence(advantages=[1.0] * 3, **SCORES)
    counted = to_floats(jax.jit(unclipped(over_sampler).apply)(*case)[1])
    assert counted["ratio/missing"] == pytest.approx(1 / 3)
    assert "ratio/missing" not in jax.eval_shape(reinforce().apply, *case)[1]


def test_missing_score_is_named():
    scores, batch = one_sequence(advantages=[1.0], logprobs=[-1.0])
    with pytest.raises(ValueError, match=r"scores\.anchor.*Need\.ANCHOR"):
        over_anchor.log(scores, batch)
