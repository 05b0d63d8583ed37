"""Losses of pairs: a chosen and a rejected completion of one prompt.

In a batch the completions of a pair are consecutive sequences of one row: 1 and 2, 3 and 4, and so
on, the chosen one first. The advantages of the chosen completion add up to the margin of the
Bradley-Terry loss.

The examples have one pair, with log-ratios 1 (chosen) and -1 (rejected).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch, segment_totals
from jaxrl.core.metrics import Metrics, masked_means
from jaxrl.losses import bounds
from jaxrl.losses.algebra import Aggregation, TokenLoss, token_loss
from jaxrl.losses.formulas import Formula, with_formula
from jaxrl.losses.scores import Need, Scores, require


class LogRatios(NamedTuple):
    """Both completions' log pi / reference, for each pair; all f32[...] of one shape."""

    chosen: jax.Array  # summed over the completion's tokens
    rejected: jax.Array
    chosen_tokens: jax.Array  # their number
    rejected_tokens: jax.Array


@dataclass(frozen=True, repr=False)
class PairLoss(Formula):
    """A loss of the DPO family: log-ratios -> one loss per pair. Beta is the strength of the
    reference; beta times the log-ratio is the implicit reward.

    Raises:
      ValueError: for a beta that is not positive: it would prefer the rejected completion, or
        neither.
    """

    beta: float
    apply: Callable[[LogRatios], jax.Array]

    def __post_init__(self) -> None:
        bounds.positive("beta", self.beta)


@with_formula
def sigmoid(*, beta: float = 0.1, label_smoothing: float = 0.0) -> PairLoss:
    """DPO (arXiv:2305.18290): -log sigmoid(beta (chosen - rejected)).

    With `label_smoothing`, conservative DPO (https://ericmitchell.ai/cdpo.pdf): that share of the
    labels is taken to be the wrong way round.

    Example:
      >>> pair = LogRatios(*jnp.array([1.0, -1.0, 4.0, 2.0]))
      >>> f"{sigmoid(beta=0.5).apply(pair):.3f}"
      '0.313'

    Raises:
      ValueError: if `label_smoothing` is not in [0, 0.5).
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={label_smoothing} must be >= 0 and < 0.5")

    def apply(x: LogRatios) -> jax.Array:
        h = beta * (x.chosen - x.rejected)
        right, wrong = jax.nn.log_sigmoid(h), jax.nn.log_sigmoid(-h)
        return -(1 - label_smoothing) * right - label_smoothing * wrong

    return PairLoss(beta, apply)


@with_formula
def hinge(*, beta: float = 0.1) -> PairLoss:
    """SLiC-HF's hinge on DPO's reward (arXiv:2305.10425, 2309.06657):
    max(0, 1 - beta (chosen - rejected)).

    Example:
      >>> pair = LogRatios(*jnp.array([1.0, -1.0, 4.0, 2.0]))
      >>> hinge(beta=0.25).apply(pair)
      Array(0.5, dtype=float32)
    """
    return PairLoss(beta, lambda x: jax.nn.relu(1 - beta * (x.chosen - x.rejected)))


@with_formula
def ipo(*, beta: float = 0.1) -> PairLoss:
    """IPO (arXiv:2310.12036) on log-ratios averaged over a completion's tokens, as TRL has it:
    (chosen / tokens - rejected / tokens - 1 / (2 beta))^2.

    Example:
      >>> pair = LogRatios(*jnp.array([1.0, -1.0, 4.0, 2.0]))
      >>> ipo(beta=0.5).apply(pair)  # (0.25 + 0.5 - 1)^2
      Array(0.0625, dtype=float32)
    """

    def apply(x: LogRatios) -> jax.Array:
        apart = x.chosen / x.chosen_tokens - x.rejected / x.rejected_tokens
        return (apart - 1 / (2 * beta)) ** 2

    return PairLoss(beta, apply)


@with_formula
def ipo_summed(*, beta: float = 0.1) -> PairLoss:
    """IPO (arXiv:2310.12036) on log-ratios of whole completions, as OpenRLHF has it:
    (chosen - rejected - 1 / (2 beta))^2.

    Example:
      >>> pair = LogRatios(*jnp.array([1.0, -1.0, 4.0, 2.0]))
      >>> ipo_summed(beta=0.5).apply(pair)
      Array(1., dtype=float32)
    """
    return PairLoss(beta, lambda x: (x.chosen - x.rejected - 1 / (2 * beta)) ** 2)


def bradley_terry(
    chosen: jax.Array, rejected: jax.Array, *, margin: jax.Array, center_rewards: float
) -> jax.Array:
    """-log sigmoid(chosen - rejected - margin) + center_rewards (chosen + rejected)^2, per pair.

    The margin, the smallest difference of the rewards that is wanted, is that of Llama 2
    (arXiv:2307.09288). The second term keeps rewards around 0; the first does not fix their mean
    (arXiv:2312.09244). TRL calls its factor center_rewards_coefficient and suggests 0.01.

    Example:
      >>> chosen, rejected = jnp.array([2.0, 4.0]), jnp.array([0.0, 0.0])
      >>> bradley_terry(chosen, rejected, margin=jnp.array([2.0, 2.0]), center_rewards=0.0).round(2)
      Array([0.69, 0.13], dtype=float32)
    """
    apart = jax.nn.log_sigmoid(chosen - rejected - margin)
    return -apart + center_rewards * (chosen + rejected) ** 2


@with_formula
def pairwise(loss: PairLoss) -> TokenLoss:
    """A loss of pairs, to be reduced by `pair_mean`: each token of a chosen completion carries an
    equal part of its pair's loss.

    Its metrics are means over pairs: the implicit rewards (reward/...), the share of pairs in which
    the chosen completion has the higher one (accuracy), and log-probs of whole completions
    (logprobs/...).

    Example:
      >>> from jaxrl.losses import objective, one_sequence
      >>> scores, batch = one_sequence(advantages=[0, 0], logprobs=[-1, -2], reference=[-2, -1])
      >>> batch = batch.replace(segments=jnp.array([[1, 2]]))
      >>> goal = objective(pairwise(sigmoid(beta=0.5)), pair_mean)
      >>> f"{goal.total(scores, batch)[0]:.3f} = {goal}"
      '0.313 = objective(pairwise(sigmoid(beta=0.5, label_smoothing=0.0)), pair_mean)'
    """

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        there, mask = pairs_there(batch), batch.action_mask

        def of_completions(values: jax.Array) -> tuple[jax.Array, jax.Array]:
            return split_pairs(segment_totals(jnp.where(mask, values, 0), batch.segments))

        chosen, rejected = of_completions(scores.logprobs - require(scores, Need.REFERENCE))
        # Where there is no pair the lengths are 0, and 0 / 0 must not reach a gradient.
        lengths = [jnp.maximum(x, 1) for x in of_completions(jnp.ones_like(scores.logprobs))]
        value = loss.apply(LogRatios(chosen, rejected, *lengths))
        parts = jnp.where(there, value / lengths[0], 0)
        shares = jnp.zeros((mask.shape[0], mask.shape[1] + 1), parts.dtype)
        shares = shares.at[:, 1 : 2 * parts.shape[1] : 2].set(parts)
        per_token = jnp.where(mask, jnp.take_along_axis(shares, batch.segments, axis=1), 0)

        logprobs = of_completions(scores.logprobs)
        reports = _compared("reward", loss.beta * chosen, loss.beta * rejected)
        reports |= {"logprobs/chosen": logprobs[0], "logprobs/rejected": logprobs[1]}
        return per_token, masked_means(reports, there)

    return token_loss(apply, Need.REFERENCE)


def ranked(
    scores: jax.Array, batch: TokenBatch, *, center_rewards: float
) -> tuple[jax.Array, Metrics]:
    """Computes the Bradley-Terry loss of a batch of pairs, whose advantages are their margins, from
    the reward of each sequence, f32[B, T + 1], as `models.scorer` gives it.

    Returns:
      The sum over pairs, to be divided by `pair_count`, and means over pairs: the rewards
      (score/...) and the share of pairs whose chosen completion has the higher one (accuracy).
    """
    there = pairs_there(batch)
    chosen, rejected = split_pairs(scores)
    margin, _ = split_pairs(segment_totals(batch.advantages, batch.segments))
    value = bradley_terry(chosen, rejected, margin=margin, center_rewards=center_rewards)
    metrics = masked_means(_compared("score", chosen, rejected), there)
    return jnp.sum(jnp.where(there, value, 0)), metrics


def split_pairs(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Divides values of sequences, [B, T + 1], into those of the chosen and of the rejected
    completions, [B, T // 2] each."""
    rejected = values[:, 2::2]
    return values[:, 1::2][:, : rejected.shape[1]], rejected


def pairs_there(batch: TokenBatch) -> jax.Array:
    """Marks the pairs of a batch, bool[B, T // 2]."""
    used = segment_totals((batch.segments > 0).astype(jnp.float32), batch.segments)
    return split_pairs(used)[1] > 0


def pair_count(batch: TokenBatch) -> jax.Array:
    """Counts the pairs in the whole batch, f32[]."""
    return jnp.sum(pairs_there(batch), dtype=jnp.float32)


pair_mean = Aggregation(
    lambda batch: batch.action_mask.astype(jnp.float32), pair_count, formula="pair_mean"
)
"""Mean over pairs of the sum over the tokens of both completions."""


def _compared(name: str, chosen: jax.Array, rejected: jax.Array) -> dict[str, jax.Array]:
    return {
        "accuracy": chosen > rejected,
        f"{name}/chosen": chosen,
        f"{name}/rejected": rejected,
        f"{name}/margin": chosen - rejected,
    }
