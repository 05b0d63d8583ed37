"""Losses as numbers: sums, multiples, and one line for every mistake."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.batch import TokenBatch
from jaxrl.losses import (
    Recipe,
    Scores,
    Weights,
    both,
    clipped,
    drift_penalty,
    fixed_length,
    grpo,
    kl_penalty,
    objective,
    one_sequence,
    over_sampler,
    product,
    reinforce,
    reweight,
    surrogate,
    token_mean,
    unclipped,
    with_terms,
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
ONES = Weights(frozenset(), lambda s, b: (jnp.ones_like(s.logprobs), {}), formula="ones")
GRPO = grpo()
REMOVED = Weights(frozenset(), lambda s, b: (b.action_mask.any(-1), {}))


@pytest.mark.parametrize("shape", REDUCED)
def test_reduced_loss_is_refused(shape):
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
    scores, batch = one_sequence(
        advantages=[1.0, -2.0], logprobs=[-1.0, -2.0], sampler=[-1.5, -1.0]
    )

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
        (2 * (a + b), 2 * x + 2 * y),
        ((a - b) / 2, x / 2 - y / 2),
        (sum([a, -b / 4]), x - y / 4),
    ):
        np.testing.assert_allclose(value(loss), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda a: a + 1, r"add 1 to a loss: a constant.* as in 0\.1 \* kl_penalty\(\)"),
        (lambda a: 0.5 + a, "add 0.5 to a loss: a constant"),
        (lambda a: 1 - a, "add 1 to a loss: a constant"),
        (lambda a: a - ONES, r"add ones to a loss: .*write weights \* loss"),
        (lambda a: ONES + a, r"to ones: weights multiply; write weights \* loss"),
        (lambda a: ONES - ONES, r"add ones to ones: weights multiply; write .*weights \* weights"),
        (lambda a: a + over_sampler, r"add over_sampler to a loss: .* clipped\(ratio\)"),
        (lambda a: over_sampler + a, r"add over_sampler to a loss: .* clipped\(ratio\)"),
        (lambda a: a + "kl_penalty", r"add 'kl_penalty' to a loss: .*without quotes, .*kl_penalty"),
        (lambda a: a + kl_penalty, r"add kl_penalty to a loss: .*call it, as in kl_penalty\(\)"),
        (lambda a: a + GRPO, r"add Recipe\(.*\) to a loss: write recipe \+ term"),
        (lambda a: a + GRPO.objective, "add objective.* to a loss: it is reduced already; reduce"),
        (lambda a: a + token_mean, r"add token_mean to a loss: write objective\(loss, aggregation"),
        (lambda a: a + None, r"add None to a loss: write a loss, such as kl_penalty\(\)"),
        (lambda a: a * a, r"a loss by reinforce\(\): losses are added, a \+ b, and scaled by num"),
        (lambda a: a / a, r"a loss by reinforce\(\): losses are added"),
        (lambda a: over_sampler * a, r"by over_sampler: .*truncated\(ratio, high=2\.0\) \* loss"),
        (lambda a: ONES * over_sampler, "multiply ones by over_sampler: make weights"),
        (lambda a: 2 * ONES, r"ones by 2: scale the loss: write weights \* \(0\.1 \* loss\)"),
        (lambda a: a / "2", "multiply a loss by '2': write a number, or Weights without quotes"),
        (
            lambda a: a * jnp.ones(3),
            r"a loss by array of shape \(3,\): factors per token are Weights",
        ),
        (
            lambda a: np.ones(3) * a,
            r"a loss by array of shape \(3,\): factors per token are Weights",
        ),
        (lambda a: a * GRPO, r"by Recipe\(.*\): scale a term, recipe \+ 0\.1 \* term"),
        (lambda a: GRPO + GRPO, r"add Recipe\(.*\) to a loss: .*the loss, recipe\.objective\.loss"),
        (lambda a: 1 + GRPO, r"add Recipe\(.*\) to 1: write recipe \+ term"),
        (lambda a: GRPO - 1, "add 1 to a loss: a constant"),
        (lambda a: 2 * GRPO, r"multiply 2 by Recipe\(.*\): scale a term, recipe \+ 0\.1 \* term"),
        (lambda a: ONES * GRPO, r"with_terms\(recipe, correction=weights\)"),
        (lambda a: both(ONES, a), r"multiply ones by reinforce\(\)"),
        (lambda a: objective(over_sampler, token_mean), r"over_sampler is not a TokenLoss; write"),
        (
            lambda a: objective(a, "token_mean"),
            "'token_mean' is not an Aggregation; write one such",
        ),
        (
            lambda a: objective(a, fixed_length),
            "fixed_length is not an Aggregation; .*fixed_length",
        ),
        (lambda a: Recipe(a, None), r"reinforce\(\) is not an Objective; write objective\(loss"),
        (
            lambda a: clipped("over_sampler"),
            "clipped: ratio='over_sampler' is text; write over_samp",
        ),
        (lambda a: clipped(a), r"clipped: ratio=reinforce\(\) is not a Ratio; .* over_sampler$"),
        (lambda a: clipped(product), "clipped: ratio=product is not a Ratio"),
        (lambda a: kl_penalty("k2"), "kl_penalty: estimator='k2' is text; write k2 without quotes"),
        (
            lambda a: kl_penalty(0.1),
            "kl_penalty: estimator=0.1 is not a KLEstimator; .* such as k3",
        ),
        (lambda a: kl_penalty(ratio=a), "kl_penalty: ratio=.* is not a Ratio"),
        (lambda a: with_terms(a, kl=0.1), r"reinforce\(\) is not a Recipe; write .* as grpo\(\)"),
        (lambda a: clipped(), r"^clipped\(\) missing 1 required positional argument: 'ratio'"),
    ],
)
def test_mistakes_name_value_and_remedy(wrong, message):
    with pytest.raises(TypeError, match=message):
        wrong(reinforce())
