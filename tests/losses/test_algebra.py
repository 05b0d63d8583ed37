"""What one's own losses get wrong, said in one line where they are put together."""

import jax.numpy as jnp
import pytest

from jaxrl.batch import TokenBatch
from jaxrl.losses import (
    Scores,
    Weights,
    both,
    objective,
    over_sampler,
    reinforce,
    reweight,
    surrogate,
    token_mean,
)


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
