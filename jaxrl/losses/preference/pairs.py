"""Pairs of completions: their log-probs in a batch, and the reduction of their losses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch, earlier_actions, segment_totals
from jaxrl.core.metrics import Metrics, masked_means
from jaxrl.losses import bounds
from jaxrl.losses.algebra import TokenLoss, Weights, chosen_before
from jaxrl.losses.formulas import Formula, with_formula
from jaxrl.losses.objectives import Aggregation
from jaxrl.losses.scores import Need, Scores, require


class ScoredCompletion(NamedTuple):
    """The log-probs of one completion of each pair; all f32[...] of one shape."""

    learner: jax.Array  # log-prob under the learner, summed over the completion's tokens
    reference: jax.Array  # the same under the reference
    tokens: jax.Array  # number of tokens
    against: jax.Array | float = 0.0  # a constant of the whole batch, from `PairLoss.across`

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

    A loss that compares a completion with the whole batch finds the numbers that it compares with
    by `across`: (all pairs, bool marks of those that are there) -> a number for each chosen and one
    for each rejected completion, all [B, T // 2]. It costs another forward pass, before the batch's
    microbatches, and no gradient passes.

    Raises:
      ValueError: for a beta that is not positive, or a tail that is not in [0, 1].
    """

    beta: float
    apply: Callable[[ScoredPair], jax.Array]
    tail: float = 1.0  # weight of log-probs beyond the length of the pair's shorter completion
    across: Callable[[ScoredPair, jax.Array], tuple[jax.Array, jax.Array]] | None = None

    def __post_init__(self) -> None:
        bounds.positive("beta", self.beta)
        bounds.fraction("tail", self.tail)


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
      >>> from jaxrl.losses.preference import sigmoid
      >>> scores, batch = one_sequence(advantages=[0, 0], logprobs=[-1, -2], reference=[-2, -1])
      >>> batch = batch.replace(segments=jnp.array([[1, 2]]))
      >>> goal = objective(pairwise(sigmoid(beta=0.5)), pair_mean)
      >>> f"{goal.total(scores, batch)[0]:.3f} = {goal}"
      '0.313 = objective(pairwise(sigmoid(beta=0.5, label_smoothing=0.0)), pair_mean)'
    """
    needs: frozenset[Need | Weights] = frozenset({Need.REFERENCE})
    across = None if loss.across is None else _across(loss, loss.across)
    if across is not None:
        needs |= {across}

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        there, mask = pairs_there(batch), batch.action_mask
        pair = _scored(scores, batch, tail=loss.tail)
        if across is not None:
            first = mask & (earlier_actions(batch) == 0)
            found = jnp.where(first, chosen_before(across, scores.whole), 0)
            numbers = split_pairs(segment_totals(found, batch.segments))
            pair = ScoredPair(
                *(one._replace(against=x) for one, x in zip(pair, numbers, strict=True))
            )
        value = jnp.where(there, loss.apply(pair) / pair.chosen.tokens, 0)
        per_token = jnp.where(mask, _at_tokens(value, jnp.zeros_like(value), batch), 0)

        rewards = (loss.beta * completion.log_ratio for completion in pair)
        totals = _of_completions(scores.logprobs, batch)
        reports = _compared("reward", *rewards)
        reports |= {"logprobs/chosen": totals[0], "logprobs/rejected": totals[1]}
        return per_token, masked_means(reports, there)

    return TokenLoss(needs, apply)


def _across(
    loss: PairLoss, numbers: Callable[[ScoredPair, jax.Array], tuple[jax.Array, jax.Array]]
) -> Weights:
    """Computes the numbers of `PairLoss.across` at each token of their completions."""

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        pair = _scored(jax.lax.stop_gradient(scores), batch, tail=loss.tail)
        return _at_tokens(*numbers(pair, pairs_there(batch)), batch), {}

    return Weights(frozenset({Need.REFERENCE}), apply, formula=f"across({loss!r})")


def _scored(scores: Scores, batch: TokenBatch, *, tail: float) -> ScoredPair:
    logprobs, reference = scores.logprobs, require(scores, Need.REFERENCE)
    # Where there is no pair the lengths are 0, and 0 / 0 must not reach a gradient.
    lengths = [jnp.maximum(x, 1) for x in _of_completions(jnp.ones_like(logprobs), batch)]
    weights = jnp.ones_like(logprobs)
    if tail != 1:
        shorter = jnp.minimum(*lengths)
        shared = earlier_actions(batch) < _at_tokens(shorter, shorter, batch)
        weights = jnp.where(shared, 1, tail)
    sums = (_of_completions(weights * values, batch) for values in (logprobs, reference))
    return ScoredPair(*(ScoredCompletion(*x) for x in zip(*sums, lengths, strict=True)))


def _of_completions(values: jax.Array, batch: TokenBatch) -> tuple[jax.Array, jax.Array]:
    """Sums over the tokens of each chosen and of each rejected completion."""
    return split_pairs(segment_totals(jnp.where(batch.action_mask, values, 0), batch.segments))


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
