"""Losses as values: pure functions of scores, added and scaled like numbers.

A `TokenLoss` maps log-probabilities to one loss per token. It never sees a model, never reduces,
and says which scores it needs, so that the learner computes these and no others. `objective` pairs
it with the one aggregation of the run.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.batch import TokenBatch
from jaxrl.metrics import Metrics


class Need(enum.StrEnum):
    """A score that costs something and is computed only when a loss needs it."""

    ENTROPY = "entropy"  # of the learner's distribution at each token
    ANCHOR = "anchor"  # log-probs of the learner at the start of the update
    SHADOW = "shadow"  # log-probs of the same weights in the sampler's dtypes
    REFERENCE = "reference"  # log-probs of the frozen reference model


@struct.dataclass(kw_only=True)
class Scores:
    """What a loss may look at; entry t scores tokens[:, t] given the tokens before it.

    Only `logprobs` and `entropy` carry a gradient. A score that no loss needs is None.
    """

    logprobs: jax.Array  # f32[B, T], the learner
    entropy: jax.Array | None = None  # f32[B, T], nats
    anchor: jax.Array | None = None  # f32[B, T]
    shadow: jax.Array | None = None  # f32[B, T]
    reference: jax.Array | None = None  # f32[B, T]


class TokenLossFn(Protocol):
    """Per-token loss f32[B, T] and metrics. Entries outside `batch.action_mask` are ignored, but
    must be finite where the inputs are."""

    def __call__(self, scores: Scores, batch: TokenBatch, /) -> tuple[jax.Array, Metrics]: ...


@dataclass(frozen=True)
class TokenLoss:
    """A loss before its reduction.

    Attributes:
      needs: the scores, beyond the learner's log-probs, that `apply` reads.
      apply: the per-token loss and its metrics.
    """

    needs: frozenset[Need]
    apply: TokenLossFn

    def __add__(self, other: "TokenLoss") -> "TokenLoss":
        return add(self, other)

    def __rmul__(self, factor: float) -> "TokenLoss":
        return scale(self, factor)


def token_loss(apply: TokenLossFn, *needs: Need) -> TokenLoss:
    """Makes a loss from a function and the scores that it reads."""
    return TokenLoss(frozenset(needs), apply)


def add(*losses: TokenLoss) -> TokenLoss:
    """The sum of losses.

    Raises:
      ValueError: when the loss is applied, if two terms report a metric of one name.
    """

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        total, metrics = jnp.zeros_like(scores.logprobs), {}
        for loss in losses:
            value, more = loss.apply(scores, batch)
            twice = sorted(metrics.keys() & more.keys())
            if twice:
                raise ValueError(f"two terms of a sum report the metric {twice[0]!r}")
            total, metrics = total + value, metrics | more
        return total, metrics

    return TokenLoss(frozenset().union(*(loss.needs for loss in losses)), apply)


def scale(loss: TokenLoss, factor: float) -> TokenLoss:
    """The loss times a constant; its metrics stay as they are."""

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        value, metrics = loss.apply(scores, batch)
        return factor * value, metrics

    return TokenLoss(loss.needs, apply)


class Aggregation(NamedTuple):
    """How per-token losses become one number: sum(weights * loss) / denominator.

    Both depend on the batch alone, never on scores, so the denominator is known before the first
    microbatch and is that of the whole batch over all devices.
    """

    weights: Callable[[TokenBatch], jax.Array]  # f32[B, T], 0 outside action_mask
    denominator: Callable[[TokenBatch], jax.Array]  # f32[]


class Objective(NamedTuple):
    """What a learner minimises.

    Attributes:
      needs: as in `TokenLoss`.
      total: (scores, batch) -> (f32[] weighted sum over this microbatch, metrics).
      denominator: batch -> f32[], of the whole batch.
    """

    needs: frozenset[Need]
    total: Callable[[Scores, TokenBatch], tuple[jax.Array, Metrics]]
    denominator: Callable[[TokenBatch], jax.Array]


def objective(loss: TokenLoss, aggregation: Aggregation) -> Objective:
    """Reduces a loss, once.

    Raises:
      TypeError: if `loss` is reduced already.
    """
    if not isinstance(loss, TokenLoss):
        raise TypeError(
            f"objective() takes a TokenLoss, got {type(loss).__name__}; aggregation happens once, "
            "on the sum of all terms"
        )

    def total(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        value, metrics = loss.apply(scores, batch)
        weights = aggregation.weights(batch)
        # Select before multiplying: 0 * inf at a token outside the mask would poison the sum.
        return jnp.sum(jnp.where(weights > 0, value, 0) * weights), metrics

    return Objective(loss.needs, total, aggregation.denominator)
