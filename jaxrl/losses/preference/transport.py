"""Alignment by optimal transport (AOT, arXiv:2406.05882): distributions over the batch are
compared, and not the two completions of a pair.

In one dimension the best transport pairs numbers of the same rank. Ranks need the whole batch, so
the partner of each completion is found before the batch's microbatches, by another forward pass.
"""

import jax
import jax.numpy as jnp

from jaxrl.losses.formulas import with_formula
from jaxrl.losses.preference.contrasts import logistic
from jaxrl.losses.preference.pairs import PairLoss, ScoredCompletion, ScoredPair


@with_formula
def aot(*, beta: float = 0.1, label_smoothing: float = 0.0) -> PairLoss:
    """AOT for pairs: the learner's log-odds of the chosen over the rejected completion, sorted over
    the batch, are to exceed the reference's, sorted: mean of -log sigmoid(beta (learner -
    reference)) over ranks. Raises as `sigmoid`.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0, 2.0), ScoredCompletion(-3, -2, 2, 2))
      >>> f"{aot(beta=0.5).apply(pair):.3f}"  # -4 + 3 = -1 and the reference's 2, softplus(1.5)
      '1.701'
    """
    loss = logistic(label_smoothing)

    def odds(x: ScoredPair) -> jax.Array:
        return x.chosen.learner - x.rejected.learner

    def partners(x: ScoredPair, there: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = _same_rank(odds(x), x.chosen.reference - x.rejected.reference, there)
        return found, found

    return PairLoss(beta, lambda x: loss(beta * (odds(x) - x.chosen.against)), across=partners)


@with_formula
def aot_unpaired(*, beta: float = 0.1, label_smoothing: float = 0.0) -> PairLoss:
    """AOT without pairs: the log-ratios of all chosen completions, sorted over the batch, are to
    exceed those of all rejected ones, sorted: mean of -log sigmoid(beta (chosen - rejected)) over
    ranks. Raises as `sigmoid`.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4, -5, 4, 0.5), ScoredCompletion(-3, -2, 2, 3.0))
      >>> f"{aot_unpaired(beta=0.5).apply(pair):.3f}"  # mean of softplus(-0.25) and softplus(-2)
      '0.351'
    """
    loss = logistic(label_smoothing)

    def partners(x: ScoredPair, there: jax.Array) -> tuple[jax.Array, jax.Array]:
        chosen, rejected = (one.log_ratio for one in x)
        return _same_rank(chosen, rejected, there), _same_rank(rejected, chosen, there)

    def beyond(completion: ScoredCompletion) -> jax.Array:
        return beta * (completion.log_ratio - completion.against)

    def apply(x: ScoredPair) -> jax.Array:
        # A comparison is met twice, by its chosen and by its rejected completion, whose partner is
        # a constant: the mean is the loss, and the sum has its gradient.
        both = loss(beyond(x.chosen)) + loss(-beyond(x.rejected))
        return both - 0.5 * jax.lax.stop_gradient(both)

    return PairLoss(beta, apply, across=partners)


def _same_rank(values: jax.Array, others: jax.Array, there: jax.Array) -> jax.Array:
    """Returns for each of `values` the one of `others` that has its rank, among pairs that are
    there; all [B, T // 2]."""
    values, others = (jnp.where(there, x, jnp.inf).ravel() for x in (values, others))
    found = jnp.zeros_like(others).at[jnp.argsort(values)].set(jnp.sort(others))
    return found.reshape(there.shape)
