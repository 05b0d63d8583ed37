"""Rejections: weights of 1 and 0 that leave tokens and sequences out of the loss.

They multiply a loss like corrections but account for no change of policy, so they may stand beside
one: `within(...) * truncated(...) * loss`. A rejected token leaves the sum and stays in the
denominator. Ratios are learner (or anchor) over sampler. Each rejection reports the share of action
tokens that it rejects.
"""

import math
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch, segment_sum
from jaxrl.core.metrics import Metrics, masked_mean
from jaxrl.losses import bounds
from jaxrl.losses.algebra import Weights
from jaxrl.losses.formulas import with_formula
from jaxrl.losses.ratios import Ratio, per_token, sequence_mean, sequence_sum
from jaxrl.losses.regularizers import k2
from jaxrl.losses.scores import Scores


def _rejection(
    rejects: Callable[[jax.Array, Scores, TokenBatch], jax.Array], ratio: Ratio, *, name: str
) -> Weights:
    """Makes weights from (log-ratio f32[B, T], scores, batch) -> bool[B, T]."""

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        gone = rejects(jax.lax.stop_gradient(ratio.clamped(scores, batch)), scores, batch)
        return 1.0 - gone, {f"rejected/{name}": masked_mean(gone, batch.action_mask)}

    return Weights(ratio.needs, apply)


@with_formula
def within(ratio: Ratio, *, low: float = 0.0, high: float) -> Weights:
    """1 where low <= ratio <= high, at the level of the ratio: `masked` without its weight. Reports
    "rejected/outside".

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
    """0 for sequences with a mean k3 estimate of the divergence, w - 1 - log w, above `high`.
    Reports "rejected/k3".

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
    bounds.positive("k3_within: high", high)
    return _sequence_within(_k3, ratio, high=high, name="k3")


@with_formula
def k2_within(ratio: Ratio, *, high: float = 0.01) -> Weights:
    """0 for sequences with a mean k2 estimate of the divergence, (log w)^2 / 2, above `high`
    (veRL's seq_mean_k2; no paper). Reports "rejected/k2". Raises as `k3_within`.

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=-1, sampler=[-1, -1.5])
      >>> for high in (0.1, 0.01):  # the mean is (0 + 0.125) / 2
      ...     print(k2_within(over_sampler, high=high).apply(scores, batch)[0])
      [[1. 1.]]
      [[0. 0.]]
    """
    bounds.positive("k2_within: high", high)
    return _sequence_within(k2, ratio, high=high, name="k2")


@with_formula
def k3_sum_within(ratio: Ratio, *, high: float = 2.0) -> Weights:
    """0 for sequences with a k3 estimate of the divergence, the sum of w - 1 - log w, above `high`
    (veRL's seq_sum_k3; no paper). Reports "rejected/k3_sum". Raises as `k3_within`.

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=-1, sampler=[-0.5, -1.5])
      >>> for high in (0.26, 0.25):  # the sum is 0.107 + 0.149
      ...     print(k3_sum_within(over_sampler, high=high).apply(scores, batch)[0])
      [[1. 1.]]
      [[0. 0.]]
    """
    bounds.positive("k3_sum_within: high", high)
    return _sequence_within(_k3, ratio, high=high, name="k3_sum", of_sequence=sequence_sum)


@with_formula
def k2_sum_within(ratio: Ratio, *, high: float = 2.0) -> Weights:
    """0 for sequences with a k2 estimate of the divergence, the sum of (log w)^2 / 2, above `high`
    (veRL's seq_sum_k2; no paper). Reports "rejected/k2_sum". Raises as `k3_within`.

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=-1, sampler=[-0.5, -1.5])
      >>> for high in (0.26, 0.24):  # the sum is 0.125 + 0.125
      ...     print(k2_sum_within(over_sampler, high=high).apply(scores, batch)[0])
      [[1. 1.]]
      [[0. 0.]]
    """
    bounds.positive("k2_sum_within: high", high)
    return _sequence_within(k2, ratio, high=high, name="k2_sum", of_sequence=sequence_sum)


def _k3(d: jax.Array) -> jax.Array:
    return jnp.expm1(d) - d


@with_formula
def error_within(ratio: Ratio, *, high: float = 2.0) -> Weights:
    """0 for sequences with a mean of e^|log w|, the factor by which two programs disagree about a
    token, above `high` (NeMo-RL's mask of log-prob errors, in MLPerf's GRPO recipe; no paper).
    Reports "rejected/error".

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=-1, sampler=[-1, -2.5])
      >>> for high in (3, 2):  # the mean is (1 + 4.482) / 2
      ...     print(error_within(over_sampler, high=high).apply(scores, batch)[0])
      [[1. 1.]]
      [[0. 0.]]

    Raises:
      ValueError: unless high > 1; for the ratio of whole sequences.
    """
    if not high > 1:
        raise ValueError(f"error_within: high={high} must be > 1, the value where w is 1")
    return _sequence_within(lambda d: jnp.exp(jnp.abs(d)), ratio, high=high, name="error")


def _sequence_within(
    of: Callable[[jax.Array], jax.Array],
    ratio: Ratio,
    *,
    high: float,
    name: str,
    of_sequence: Callable[[jax.Array, TokenBatch], jax.Array] = sequence_mean,
) -> Weights:
    per_token(ratio, reader=f"{name}_within")

    def rejects(d: jax.Array, scores: Scores, batch: TokenBatch) -> jax.Array:
        return of_sequence(of(d), batch) > high

    return _rejection(rejects, ratio, name=name)


@with_formula
def vetoed(ratio: Ratio, *, low: float = 1e-4, high: float = math.inf) -> Weights:
    """0 for sequences with a token whose ratio is below `low` or above `high`: nearly impossible
    for the learner or, with a finite `high`, for the sampler (SkyRL's and AReaL's outlier masks; no
    paper). Reports "rejected/veto".

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=[-1, -12], sampler=-1)
      >>> print(vetoed(over_sampler, low=1e-4).apply(scores, batch)[0])
      [[0. 0.]]

    Raises:
      ValueError: unless 0 <= low < 1 < high; for the ratio of whole sequences.
    """
    per_token(ratio, reader="vetoed")
    if not 0 <= low < 1 < high:
        raise ValueError(f"vetoed needs 0 <= low < 1 < high, got low={low}, high={high}")

    def rejects(d: jax.Array, scores: Scores, batch: TokenBatch) -> jax.Array:
        w = jnp.exp(d)
        tokens = ((w < low) | (w > high)) & batch.action_mask
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


class Divergence(Protocol):
    """(log p of the learner, log q of another policy), f32[B, T] -> the divergence of their choices
    between the token and all others, f32[B, T]."""

    def __call__(self, logp: jax.Array, logq: jax.Array, /) -> jax.Array:
        """Must not be negative."""


def total_variation(logp: jax.Array, logq: jax.Array) -> jax.Array:
    """|p - q|, f32[B, T]: binary total variation (arXiv:2602.04879, equation 13).

    Example:
      >>> print(f"{total_variation(jnp.log(0.5), jnp.log(0.75)):.3f}")
      0.250
    """
    return jnp.abs(jnp.exp(logp) - jnp.exp(logq))


def binary_kl(logp: jax.Array, logq: jax.Array) -> jax.Array:
    """Binary KL divergence (arXiv:2602.04879, equation 14), f32[B, T]:
    q log q / p + (1 - q) log (1 - q) / (1 - p), where 1 - p and 1 - q are at least 1e-8.

    Example:
      >>> print(f"{binary_kl(jnp.log(0.5), jnp.log(0.75)):.3f}")
      0.131
    """
    others_p, others_q = (jnp.log(jnp.maximum(-jnp.expm1(x), 1e-8)) for x in (logp, logq))
    return jnp.exp(logq) * (logq - logp) - jnp.expm1(logq) * (others_q - others_p)


@with_formula
def trust_region(
    ratio: Ratio, divergence: Divergence, *, low: float = 0.2, high: float = 0.2
) -> Weights:
    """DPPO's trust region (arXiv:2602.04879): 0 where p, the learner's probability of the token,
    has moved too far from q, the probability under the ratio's other policy, in the direction of
    the advantage: A > 0, p > q and a divergence above `high`, or A <= 0, p < q and one above `low`.
    Reports "rejected/divergence".

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> now, before = jnp.log(jnp.array([0.1, 0.9])), jnp.log(jnp.array([0.01, 0.5]))
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=now, sampler=before)
      >>> region = trust_region(over_sampler, total_variation)
      >>> print(region.apply(scores, batch)[0])  # the rare token may move
      [[1. 0.]]

    Raises:
      ValueError: for a negative bound, or the ratio of whole sequences.
    """
    bounds.not_negative("trust_region: low", low)
    bounds.not_negative("trust_region: high", high)

    def beyond(apart: jax.Array, d: jax.Array, batch: TokenBatch) -> jax.Array:
        return jnp.where(batch.advantages > 0, (d > 0) & (apart > high), (d < 0) & (apart > low))

    return _divergent(beyond, ratio, divergence, reader="trust_region")


@with_formula
def near(ratio: Ratio, divergence: Divergence, *, high: float = 0.1) -> Weights:
    """0 where the divergence of the learner from the ratio's other policy exceeds `high`, whatever
    the sign of the advantage. Reports "rejected/divergence".

    With `total_variation` the mask of prime-rl's loss "ipo", which has no paper.

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> now, before = jnp.log(jnp.array([0.5, 0.5])), jnp.log(jnp.array([0.9, 0.55]))
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=now, sampler=before)
      >>> print(near(over_sampler, total_variation).apply(scores, batch)[0])
      [[0. 1.]]

    Raises:
      ValueError: for a bound that is not positive, or the ratio of whole sequences.
    """
    bounds.positive("near: high", high)
    return _divergent(lambda apart, d, batch: apart > high, ratio, divergence, reader="near")


def _divergent(
    beyond: Callable[[jax.Array, jax.Array, TokenBatch], jax.Array],
    ratio: Ratio,
    divergence: Divergence,
    *,
    reader: str,
) -> Weights:
    """Makes weights from (divergence, log-ratio, batch) -> bool[B, T]."""
    per_token(ratio, reader=reader)

    def rejects(d: jax.Array, scores: Scores, batch: TokenBatch) -> jax.Array:
        logp = jax.lax.stop_gradient(scores.logprobs)
        return beyond(divergence(logp, logp - d), d, batch)

    return _rejection(rejects, ratio, name="divergence")
