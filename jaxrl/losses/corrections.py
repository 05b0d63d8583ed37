"""Corrections: weights for tokens that another policy sampled.

They are made from any ratio at any level: `truncated(anchor_over_sampler, high=2)` is token-level
truncated importance sampling, `masked(product(anchor_over_sampler), high=10)` masks whole
sequences. Bounds hold for learner (or anchor) over sampler.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch
from jaxrl.core.metrics import Metrics, masked_mean, masked_means
from jaxrl.losses.algebra import Weights, applied, of_whole_batch
from jaxrl.losses.formulas import with_formula
from jaxrl.losses.objectives import Aggregation
from jaxrl.losses.ratios import Ratio, missing
from jaxrl.losses.scores import Scores


@with_formula
def truncated(ratio: Ratio, *, low: float = 0.0, high: float) -> Weights:
    """Weights clip(w, low, high): truncated importance sampling.

    Reports "correction/mean", the mean weight, "correction/outside", the share of action tokens
    whose ratio is out of bounds, and "correction/missing", the share without a sampler log-prob
    (weight 1).

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=-1, sampler=[-1, -2])
      >>> print(truncated(over_sampler, high=2).apply(scores, batch)[0])
      [[1. 2.]]

    Raises:
      ValueError: unless 0 <= low < 1 < high.
    """
    return _bounded(ratio, low=low, high=high, weights=lambda w, outside: jnp.clip(w, low, high))


@with_formula
def masked(ratio: Ratio, *, low: float = 0.0, high: float) -> Weights:
    """Weights w where low <= w <= high and 0 elsewhere: masked importance sampling (with the bounds
    .5 and 5 per token: IcePop). A masked token stays in the denominator.

    Reports and raises as `truncated` does.

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=-1, sampler=[-1, -2])
      >>> print(masked(over_sampler, high=2).apply(scores, batch)[0])
      [[1. 0.]]
    """
    return _bounded(ratio, low=low, high=high, weights=lambda w, outside: jnp.where(outside, 0, w))


@with_formula
def gamma_shaped(
    ratio: Ratio,
    *,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> Weights:
    """VESPO's weights (arXiv:2602.10693): e^lam w^k e^(-lam w), which is 1 at w = 1 and falls to 0
    on both sides; (k, lam) is `positive` where A >= 0 and `negative` elsewhere.

    Reports "correction/mean" and "correction/missing" as `truncated` does.

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> for sampler in (-1, -2, 1):  # w = 1, e, e^-2
      ...     scores, batch = one_sequence(advantages=[1], logprobs=-1, sampler=sampler)
      ...     print(f"{gamma_shaped(over_sampler).apply(scores, batch)[0].item():.3f}")
      1.000
      0.043
      0.245

    Raises:
      ValueError: for a k or a lam that is not positive.
    """
    if not all(number > 0 for number in (*positive, *negative)):
        raise ValueError(
            f"gamma_shaped: k and lam must be > 0, got positive={positive}, negative={negative}"
        )

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        w = ratio.value(scores, batch)
        k, lam = (
            jnp.where(batch.advantages >= 0, p, n) for p, n in zip(positive, negative, strict=True)
        )
        weights = jnp.exp(k * jnp.log(w) + lam * (1 - w))
        metrics = {"correction/mean": masked_mean(weights, batch.action_mask)}
        return weights, metrics | missing(ratio, batch, name="correction/missing")

    return Weights(ratio.needs, apply, ratio.weighted)


@of_whole_batch
def normalized(weights: Weights, aggregation: Aggregation) -> Weights:
    """Weights divided by their mean over the batch, which is 1 then: a bound that truncates, or a
    mismatch of the two programs, does not change the size of a step. The aggregation says which
    mean: `token_mean`, or `sequence_mean_token_mean` for weights of whole sequences (veRL's
    rollout_is_batch_normalize; no paper). It costs a forward pass.

    Reports as the weights, before the division.

    Example:
      >>> from jaxrl.losses import objective, one_sequence, over_sampler, reinforce, token_mean
      >>> weights = normalized(truncated(over_sampler, high=3), token_mean)
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=-1, sampler=[-1, -3])
      >>> goal = objective(weights * reinforce(), token_mean)
      >>> print(goal.survey(scores, batch)[0].whole[repr(weights)])  # 1 and 3 over 2
      [[0.5 1.5]]

    Raises:
      ValueError: for weights that contain weights of the whole batch already.
    """

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        found, metrics = applied(weights, scores, batch)
        counted = aggregation.weights(batch)
        total = jnp.sum(jnp.where(counted != 0, found, 0) * counted)
        mean = total / jnp.maximum(aggregation.denominator(batch), 1)
        # A mean that is not a number stays one, so that the step is skipped and counted.
        return jnp.where(mean == 0, 0, found / jnp.where(mean == 0, 1, mean)), metrics

    return Weights(weights.needs, apply, weights.weighted)


def _bounded(
    ratio: Ratio, *, low: float, high: float, weights: Callable[[jax.Array, jax.Array], jax.Array]
) -> Weights:
    """Makes weights from (ratio, bool marks where it is out of bounds)."""
    if not 0 <= low < 1 < high:
        raise ValueError(f"a correction needs 0 <= low < 1 < high, got low={low}, high={high}")

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        w = ratio.value(scores, batch)
        outside = (w < low) | (w > high)
        reports = {"correction/mean": weights(w, outside), "correction/outside": outside}
        metrics = masked_means(reports, batch.action_mask)
        metrics |= missing(ratio, batch, name="correction/missing")
        return reports["correction/mean"], metrics

    return Weights(ratio.needs, apply, ratio.weighted)
