"""Rejections: weights of 1 and 0 that leave tokens and sequences out of the loss.

They multiply a loss like corrections but account for no change of policy, so they may stand beside
one: `within(...) * truncated(...) * loss`. A rejected token leaves the sum and stays in the
denominator. Ratios are the learner's side over the sampler's. Each reports the share of action
tokens that it rejects.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch, segment_sum
from jaxrl.core.metrics import Metrics, masked_mean
from jaxrl.losses import bounds
from jaxrl.losses.algebra import Weights
from jaxrl.losses.formulas import with_formula
from jaxrl.losses.ratios import LOG_RATIO_LIMIT, Ratio, per_token, sequence_mean
from jaxrl.losses.scores import Scores


def _rejection(
    rejects: Callable[[jax.Array, Scores, TokenBatch], jax.Array], ratio: Ratio, *, name: str
) -> Weights:
    """Makes weights of (log-ratio f32[B, T], scores, batch) -> bool[B, T]."""

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        d = jnp.clip(ratio.log(scores, batch), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        d = jax.lax.stop_gradient(d)
        gone = rejects(d, scores, batch)
        return 1.0 - gone, {f"rejected/{name}": masked_mean(gone, batch.action_mask)}

    return Weights(ratio.needs, apply)


@with_formula
def within(ratio: Ratio, *, low: float = 0.0, high: float) -> Weights:
    """1 where low <= ratio <= high, at the level of the ratio; the mask of `corrections.masked`
    without its weight. Reports "rejected/outside".

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=-1, sampler=[-1.5, -2])
      >>> print(within(over_sampler, high=2).apply(scores, batch)[0])
      [[1. 0.]]

    Raises:
      ValueError: unless 0 <= low < 1 < high.
    """
    if not 0 <= low < 1 < high:
        raise ValueError(f"within needs 0 <= low < 1 < high, got low={low}, high={high}")

    def rejects(d: jax.Array, scores: Scores, batch: TokenBatch) -> jax.Array:
        w = jnp.exp(d)
        return (w < low) | (w > high)

    return _rejection(rejects, ratio, name="outside")


@with_formula
def k3_within(ratio: Ratio, *, high: float = 0.01) -> Weights:
    """0 for sequences whose mean over tokens of w - 1 - log w, the k3 estimate of the divergence,
    exceeds `high`. Reports "rejected/k3".

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=-1, sampler=[-1, -1.5])
      >>> for high in (0.1, 0.01):  # the mean is (0 + 0.149) / 2
      ...     print(k3_within(over_sampler, high=high).apply(scores, batch)[0])
      [[1. 1.]]
      [[0. 0.]]

    Raises:
      ValueError: unless high > 0; for the ratio of whole sequences.
    """
    per_token(ratio, reader="k3_within")
    bounds.positive("k3_within: high", high)

    def rejects(d: jax.Array, scores: Scores, batch: TokenBatch) -> jax.Array:
        return sequence_mean(jnp.expm1(d) - d, batch) > high

    return _rejection(rejects, ratio, name="k3")


@with_formula
def vetoed(ratio: Ratio, *, below: float = 1e-4) -> Weights:
    """0 for sequences with a token whose ratio is less than `below`: one that the learner considers
    all but impossible. Reports "rejected/veto".

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=[-1, -12], sampler=-1)
      >>> print(vetoed(over_sampler, below=1e-4).apply(scores, batch)[0])
      [[0. 0.]]

    Raises:
      ValueError: unless 0 < below < 1; for the ratio of whole sequences.
    """
    per_token(ratio, reader="vetoed")
    if not 0 < below < 1:
        raise ValueError(f"vetoed: below={below} must lie between 0 and 1")

    def rejects(d: jax.Array, scores: Scores, batch: TokenBatch) -> jax.Array:
        tokens = (jnp.exp(d) < below) & batch.action_mask
        return segment_sum(tokens.astype(jnp.float32), batch.segments) > 0

    return _rejection(rejects, ratio, name="veto")


@with_formula
def off_policy_negatives(ratio: Ratio, *, delta: float) -> Weights:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556): 0 for sequences with A < 0
    whose mean over tokens of -log ratio exceeds `delta`: bad completions that have become unlikely
    under the learner. Reports "rejected/opsm".

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> weights = off_policy_negatives(over_sampler, delta=0.5)
      >>> for advantage in (1, -1):
      ...     scores, batch = one_sequence(advantages=[advantage], logprobs=-2, sampler=-1)
      ...     print(advantage, weights.apply(scores, batch)[0])
      1 [[1.]]
      -1 [[0.]]

    Raises:
      ValueError: unless delta > 0; for the ratio of whole sequences.
    """
    per_token(ratio, reader="off_policy_negatives")
    bounds.positive("off_policy_negatives: delta", delta)

    def rejects(d: jax.Array, scores: Scores, batch: TokenBatch) -> jax.Array:
        return (batch.advantages < 0) & (sequence_mean(-d, batch) > delta)

    return _rejection(rejects, ratio, name="opsm")


@with_formula
def within_variation(ratio: Ratio, *, low: float = 0.2, high: float = 0.2) -> Weights:
    """DPPO's trust region (arXiv:2602.04879) in total variation: with p the learner's probability
    of the token and q that of the ratio's other policy, 0 where A > 0 and p - q > high, or A <= 0
    and p - q < -low. Reports "rejected/variation".

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> now, before = jnp.log(jnp.array([0.1, 0.9])), jnp.log(jnp.array([0.01, 0.5]))
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=now, sampler=before)
      >>> print(within_variation(over_sampler).apply(scores, batch)[0])  # the rare token may move
      [[1. 0.]]

    Raises:
      ValueError: for bounds outside [0, 1], or the ratio of whole sequences.
    """
    per_token(ratio, reader="within_variation")
    if not (0 <= low <= 1 and 0 <= high <= 1):
        raise ValueError(f"within_variation: low={low} and high={high} must lie in [0, 1]")

    def rejects(d: jax.Array, scores: Scores, batch: TokenBatch) -> jax.Array:
        logprobs = jax.lax.stop_gradient(scores.logprobs)
        moved = jnp.exp(logprobs) - jnp.exp(logprobs - d)
        return jnp.where(batch.advantages > 0, moved > high, moved < -low)

    return _rejection(rejects, ratio, name="variation")
