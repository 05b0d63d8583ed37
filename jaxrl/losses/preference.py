"""Losses of pairs: a chosen and a rejected completion of one prompt.

In a batch the completions of a pair are consecutive sequences of one row: 1 and 2, 3 and 4, and so
on, the chosen one first. The advantages of the chosen completion add up to the margin of the
Bradley-Terry loss.

The examples have one pair: log-ratios 1 over 4 tokens (chosen) and -1 over 2 (rejected).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch, earlier_actions, segment_totals
from jaxrl.core.metrics import Metrics, masked_means
from jaxrl.losses import bounds
from jaxrl.losses.algebra import TokenLoss, token_loss
from jaxrl.losses.formulas import Formula, with_formula
from jaxrl.losses.objectives import Aggregation
from jaxrl.losses.scores import Need, Scores, require


class ScoredCompletion(NamedTuple):
    """The log-probs of one completion of each pair; all f32[...] of one shape."""

    learner: jax.Array  # log-prob under the learner, summed over the completion's tokens
    reference: jax.Array  # the same under the reference
    tokens: jax.Array  # number of tokens

    @property
    def log_ratio(self) -> jax.Array:
        """Log of learner / reference."""
        return self.learner - self.reference

    @property
    def mean_log_ratio(self) -> jax.Array:
        """The log-ratio averaged over the tokens."""
        return self.log_ratio / self.tokens


class ScoredPair(NamedTuple):
    """Both completions of each pair.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> pair.chosen.log_ratio, pair.rejected.mean_log_ratio
      (1.0, -0.5)
    """

    chosen: ScoredCompletion
    rejected: ScoredCompletion

    @property
    def apart(self) -> jax.Array:
        """Log-ratio of the chosen completion minus the log-ratio of the rejected one."""
        return self.chosen.log_ratio - self.rejected.log_ratio

    @property
    def mean_apart(self) -> jax.Array:
        """The same difference of log-ratios averaged over the tokens."""
        return self.chosen.mean_log_ratio - self.rejected.mean_log_ratio


@dataclass(frozen=True, repr=False)
class PairLoss(Formula):
    """A loss of the DPO family: log-probs of both completions -> one loss per pair. Beta is the
    strength of the reference; beta times the log-ratio is the implicit reward.

    Raises:
      ValueError: for a beta that is not positive, or a tail that is not in [0, 1].
    """

    beta: float
    apply: Callable[[ScoredPair], jax.Array]
    tail: float = 1.0  # weight of log-probs beyond the length of the pair's shorter completion

    def __post_init__(self) -> None:
        bounds.positive("beta", self.beta)
        bounds.fraction("tail", self.tail)


@with_formula
def sigmoid(*, beta: float = 0.1, label_smoothing: float = 0.0) -> PairLoss:
    """DPO (arXiv:2305.18290): -log sigmoid(beta (chosen - rejected)).

    With `label_smoothing`, conservative DPO (https://ericmitchell.ai/cdpo.pdf): the share of labels
    that are assumed to be swapped.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> f"{sigmoid(beta=0.5).apply(pair):.3f}"
      '0.313'

    Raises:
      ValueError: if `label_smoothing` is not in [0, 0.5).
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={label_smoothing} must be >= 0 and < 0.5")

    def apply(x: ScoredPair) -> jax.Array:
        h = beta * x.apart
        right, wrong = jax.nn.log_sigmoid(h), jax.nn.log_sigmoid(-h)
        return -(1 - label_smoothing) * right - label_smoothing * wrong

    return PairLoss(beta, apply)


@with_formula
def hinge(*, beta: float = 0.1) -> PairLoss:
    """SLiC-HF's hinge on DPO's reward (arXiv:2305.10425, 2309.06657):
    max(0, 1 - beta (chosen - rejected)).

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> float(hinge(beta=0.25).apply(pair))
      0.5
    """
    return PairLoss(beta, lambda x: jax.nn.relu(1 - beta * x.apart))


@with_formula
def ipo(*, beta: float = 0.1) -> PairLoss:
    """IPO (arXiv:2310.12036) on log-ratios averaged over a completion's tokens, as TRL has it:
    (chosen / tokens - rejected / tokens - 1 / (2 beta))^2.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> ipo(beta=0.5).apply(pair)  # (0.25 + 0.5 - 1)^2
      0.0625
    """
    return PairLoss(beta, lambda x: (x.mean_apart - 1 / (2 * beta)) ** 2)


@with_formula
def ipo_summed(*, beta: float = 0.1) -> PairLoss:
    """IPO (arXiv:2310.12036) on log-ratios of whole completions, as OpenRLHF has it:
    (chosen - rejected - 1 / (2 beta))^2.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> ipo_summed(beta=0.5).apply(pair)
      1.0
    """
    return PairLoss(beta, lambda x: (x.apart - 1 / (2 * beta)) ** 2)


@with_formula
def sigmoid_averaged(*, beta: float = 5.0) -> PairLoss:
    """Length-normalised DPO (Tulu 3, arXiv:2411.15124), on log-ratios averaged over a completion's
    tokens: -log sigmoid(beta (chosen / tokens - rejected / tokens)). As averages are smaller than
    sums, beta is larger than in DPO.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> f"{sigmoid_averaged(beta=4.0).apply(pair):.3f}"  # softplus(-4 (0.25 + 0.5))
      '0.049'
    """
    return PairLoss(beta, lambda x: -jax.nn.log_sigmoid(beta * x.mean_apart))


@with_formula
def rpo(*, beta: float = 0.1, nll: float = 1.0) -> PairLoss:
    """DPO and the likelihood of the chosen completion (iterative RPO, arXiv:2404.19733):
    -log sigmoid(beta (chosen - rejected)) - nll log pi(chosen) / tokens. The likelihood keeps the
    chosen completion from losing probability as well. The paper scales the first term instead, by
    1. TRL divides by the tokens of all chosen completions of a batch.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> f"{rpo(beta=0.5, nll=0.1).apply(pair):.3f}"  # 0.313 + 0.1 x 4 / 4
      '0.413'

    Raises:
      ValueError: for a negative `nll`.
    """
    bounds.not_negative("nll", nll)
    dpo = sigmoid(beta=beta)

    def apply(x: ScoredPair) -> jax.Array:
        return dpo.apply(x) - nll * x.chosen.learner / x.chosen.tokens

    return PairLoss(beta, apply)


@with_formula
def length_desensitized(*, beta: float = 0.1, tail: float = 0.5) -> PairLoss:
    """LD-DPO (arXiv:2409.06411): DPO in which log-probs beyond the length of the shorter completion
    count `tail` times, under the learner and the reference, so that no completion wins by its
    length. With 1 it is DPO; the paper's best values are .3 to .6.

    Example:
      >>> print(length_desensitized(tail=0.25))
      length_desensitized(beta=0.1, tail=0.25)

    Raises:
      ValueError: for a tail that is not in [0, 1].
    """
    return dataclasses.replace(sigmoid(beta=beta), tail=tail)


def bradley_terry(
    chosen: jax.Array, rejected: jax.Array, *, margin: jax.Array, center_rewards: float
) -> jax.Array:
    """-log sigmoid(chosen - rejected - margin) + center_rewards (chosen + rejected)^2, per pair.

    The margin is the wanted difference of the rewards (Llama 2, arXiv:2307.09288). The second term
    keeps rewards around 0; the first does not fix their mean (arXiv:2312.09244). TRL calls its
    factor center_rewards_coefficient and suggests 0.01.

    Example:
      >>> chosen, rejected = jnp.array([2.0, 4.0]), jnp.array([0.0, 0.0])
      >>> bradley_terry(chosen, rejected, margin=jnp.array([2.0, 2.0]), center_rewards=0.0).round(2)
      Array([0.69, 0.13], dtype=float32)
    """
    apart = jax.nn.log_sigmoid(chosen - rejected - margin)
    return -apart + center_rewards * (chosen + rejected) ** 2


@with_formula
def pairwise(loss: PairLoss) -> TokenLoss:
    """A loss of pairs, for `pair_mean`: each token of a chosen completion carries an equal part of
    its pair's loss.

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
        logprobs, reference = scores.logprobs, require(scores, Need.REFERENCE)

        def of_completions(values: jax.Array) -> tuple[jax.Array, jax.Array]:
            return split_pairs(segment_totals(jnp.where(mask, values, 0), batch.segments))

        totals = of_completions(logprobs)
        # Where there is no pair the lengths are 0, and 0 / 0 must not reach a gradient.
        lengths = [jnp.maximum(x, 1) for x in of_completions(jnp.ones_like(logprobs))]
        weights = jnp.ones_like(logprobs)
        if loss.tail != 1:
            shorter = jnp.minimum(*lengths)
            shared = earlier_actions(batch) < _at_tokens(shorter, shorter, batch)
            weights = jnp.where(shared, 1, loss.tail)
        sums = of_completions(weights * logprobs), of_completions(weights * reference), lengths
        pair = ScoredPair(*(ScoredCompletion(*numbers) for numbers in zip(*sums, strict=True)))
        value = jnp.where(there, loss.apply(pair) / lengths[0], 0)
        per_token = jnp.where(mask, _at_tokens(value, jnp.zeros_like(value), batch), 0)

        rewards = (loss.beta * completion.log_ratio for completion in pair)
        reports = _compared("reward", *rewards)
        reports |= {"logprobs/chosen": totals[0], "logprobs/rejected": totals[1]}
        return per_token, masked_means(reports, there)

    return token_loss(apply, Need.REFERENCE)


def ranked(
    scores: jax.Array, batch: TokenBatch, *, center_rewards: float
) -> tuple[jax.Array, Metrics]:
    """Computes the Bradley-Terry loss of a batch of pairs, whose advantages are their margins, from
    the reward of each sequence, f32[B, T + 1], as `models.scorer` gives it.

    Returns:
      The sum over pairs, to be divided by `pair_count`, and means over pairs: the rewards
      (score/...) and the share of pairs with the higher reward for the chosen one (accuracy).
    """
    there = pairs_there(batch)
    chosen, rejected = split_pairs(scores)
    margin, _ = split_pairs(segment_totals(batch.advantages, batch.segments))
    value = bradley_terry(chosen, rejected, margin=margin, center_rewards=center_rewards)
    metrics = masked_means(_compared("score", chosen, rejected), there)
    return jnp.sum(jnp.where(there, value, 0)), metrics


def split_pairs(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Divides values of sequences, [B, T + 1], into values of the chosen and of the rejected
    completions, [B, T // 2] each."""
    rejected = values[:, 2::2]
    return values[:, 1::2][:, : rejected.shape[1]], rejected


def _at_tokens(chosen: jax.Array, rejected: jax.Array, batch: TokenBatch) -> jax.Array:
    """Inverts `split_pairs`, at each token: [B, T // 2] each -> [B, T]; 0 at padding."""
    rows, length = batch.segments.shape
    values = jnp.zeros((rows, length + 1), chosen.dtype)
    end = 2 * chosen.shape[1]
    values = values.at[:, 1:end:2].set(chosen).at[:, 2 : end + 1 : 2].set(rejected)
    return jnp.take_along_axis(values, batch.segments, axis=1)


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
