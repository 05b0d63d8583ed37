"""What one's own losses get wrong, said in one line where they are put together."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.batch import TokenBatch
from jaxrl.losses import (
    Scores,
    Weights,
    both,
    drift_penalty,
    objective,
    over_sampler,
    reinforce,
    reweight,
    surrogate,
    token_mean,
    unclipped,
)
from tests.losses.cases import one_row


def square(length=4):
    """As many rows as tokens in a row: [B] would be broadcast along the other axis."""
    zeros = jnp.zeros((length, length))
    integers = zeros.astype(jnp.int32)
    batch = TokenBatch(
        tokens=integers,
        segments=integers + 1,
        positions=integers,
        action_mask=integers == 0,
        sampler_logprobs=zeros,
        advantages=zeros + 1,
    )
    return Scores(logprobs=zeros), batch


REDUCED = {
    (): lambda r, a: -(r * a).mean(),
    (4,): lambda r, a: -(r * a).sum(-1),
    (4, 1): lambda r, a: -(r * a).sum(-1, keepdims=True),
}
ONES = Weights(frozenset(), lambda s, b: (jnp.ones_like(s.logprobs), {}))
REMOVED = Weights(frozenset(), lambda s, b: (b.action_mask.any(-1), {}))


@pytest.mark.parametrize("shape", REDUCED)
def test_a_loss_that_is_reduced_already_is_refused(shape):
    """Broadcast, it would be trained on with another gradient."""
    own = surrogate(REDUCED[shape], over_sampler)
    for loss in (own, 2.0 * own, own + reinforce(), reweight(own, both(ONES, ONES))):
        with pytest.raises(ValueError, match=r"one number per token \(4, 4\).*aggregation") as e:
            objective(loss, token_mean).total(*square())
        assert f"the loss has shape {shape}," in str(e.value)


def test_weights_for_whole_rows_are_refused():
    for weights in (REMOVED, both(REMOVED, ONES), both(ONES, REMOVED)):
        with pytest.raises(ValueError, match=r"the weights have shape \(4,\), expected"):
            objective(reweight(reinforce(), weights), token_mean).total(*square())


def test_losses_are_added_and_scaled_like_numbers():
    a, b = unclipped(over_sampler), drift_penalty(over_sampler)
    scores, batch = one_row(advantages=[1.0, -2.0], logprobs=[-1.0, -2.0], sampler=[-1.5, -1.0])

    def value(loss):
        found, metrics = loss.apply(scores, batch)
        assert loss.weighted == a.weighted  # what a refuses to count twice, its sums refuse
        assert "ratio/mean" in metrics
        return found

    x, y = a.apply(scores, batch)[0], b.apply(scores, batch)[0]
    for loss, expected in (
        (a - 0.5 * b, x - 0.5 * y),
        (a - b * 0.5, x - 0.5 * y),
        (-a + b / 4, y / 4 - x),
        (sum([a, b]), x + y),
        (np.float64(3) * a, 3 * x),
        (a * jnp.float32(3), 3 * x),
    ):
        np.testing.assert_allclose(value(loss), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda a: a + 1, "a loss is added to a loss, or subtracted from one; got 1$"),
        (lambda a: 0.5 + a, "added to a loss.*got 0.5$"),
        (lambda a: a - ONES, "subtracted from one; got Weights"),
        (lambda a: a * a, "divided by a number, got TokenLoss"),
        (lambda a: ONES * a, r"reweight\(loss, weights\) multiplies by Weights"),
        (lambda a: a / "2", "divided by a number, got '2'"),
        (lambda a: a * jnp.ones(3), "multiplied or divided by a number"),
    ],
)
def test_what_losses_do_not_go_with_says_so(wrong, message):
    with pytest.raises(TypeError, match=message):
        wrong(reinforce())
