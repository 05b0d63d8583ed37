"""Losses in which each completion stands by itself: its implicit reward, beta times its log-ratio,
is compared with a constant, so a chosen completion cannot win by the other's fall alone.
"""

import jax
import jax.numpy as jnp

from jaxrl.losses.formulas import with_formula
from jaxrl.losses.preference.pairs import PairLoss, ScoredCompletion, ScoredPair


@with_formula
def nca(*, beta: float = 0.1) -> PairLoss:
    """Noise contrastive alignment (NCA, arXiv:2402.05369), for pairs: -log sigmoid(c) -
    (log sigmoid(-c) + log sigmoid(-r)) / 2, c and r the implicit rewards.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> f"{nca(beta=0.5).apply(pair):.3f}"  # 0.474 + (0.974 + 0.474) / 2
      '1.198'
    """

    def apply(x: ScoredPair) -> jax.Array:
        chosen, rejected = (beta * one.log_ratio for one in x)
        noise = jax.nn.log_sigmoid(-chosen) + jax.nn.log_sigmoid(-rejected)
        return -jax.nn.log_sigmoid(chosen) - 0.5 * noise

    return PairLoss(beta, apply)


@with_formula
def bco(*, beta: float = 0.1) -> PairLoss:
    """Binary classifier optimisation (BCO, arXiv:2404.04656), for pairs: -log sigmoid(c - delta) -
    log sigmoid(delta - r), c and r the implicit rewards, delta the mean of both over the batch.
    It costs a forward pass.

    The paper's delta is a mean over the run so far. TRL's bco_pair leaves it out.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> f"{bco(beta=0.5).apply(pair):.3f}"  # of a batch whose mean is 0: 2 softplus(-0.5)
      '0.948'
    """

    def apply(x: ScoredPair) -> jax.Array:
        chosen, rejected = (beta * (one.log_ratio - one.against) for one in x)
        return -jax.nn.log_sigmoid(chosen) - jax.nn.log_sigmoid(-rejected)

    def mean(x: ScoredPair, there: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = jnp.sum(jnp.where(there, x.chosen.log_ratio + x.rejected.log_ratio, 0))
        found = jnp.full(there.shape, total / jnp.maximum(2 * jnp.sum(there), 1))
        return found, found

    return PairLoss(beta, apply, across=mean)


@with_formula
def sppo_hard(*, beta: float = 0.1) -> PairLoss:
    """SPPO (arXiv:2405.00675) with hard labels, the winning probabilities 1 and 0:
    (chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2, of log-ratios.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> sppo_hard(beta=0.25).apply(pair)  # (1 - 2)^2 + (-1 + 2)^2
      2.0
    """

    def apply(x: ScoredPair) -> jax.Array:
        wanted = 1 / (2 * beta)
        return (x.chosen.log_ratio - wanted) ** 2 + (x.rejected.log_ratio + wanted) ** 2

    return PairLoss(beta, apply)


@with_formula
def apo_zero(*, beta: float = 0.1) -> PairLoss:
    """APO-zero (arXiv:2408.06266, equation 7), for chosen completions that are better than the
    model's own: 1 - sigmoid(c) + sigmoid(r), c and r the implicit rewards.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> f"{apo_zero(beta=0.5).apply(pair):.3f}"  # 2 sigmoid(-0.5)
      '0.755'
    """

    def apply(x: ScoredPair) -> jax.Array:
        chosen, rejected = (beta * one.log_ratio for one in x)
        return jax.nn.sigmoid(-chosen) + jax.nn.sigmoid(rejected)

    return PairLoss(beta, apply)


@with_formula
def apo_down(*, beta: float = 0.1) -> PairLoss:
    """APO-down (arXiv:2408.06266, equation 8), for chosen completions that are worse than the
    model's own: sigmoid(c) + 1 - sigmoid(c - r), c and r the implicit rewards. Both completions
    lose probability, the rejected one more.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> f"{apo_down(beta=0.5).apply(pair):.3f}"  # sigmoid(0.5) + sigmoid(-1)
      '0.891'
    """

    def reward(completion: ScoredCompletion) -> jax.Array:
        return beta * completion.log_ratio

    def apply(x: ScoredPair) -> jax.Array:
        return jax.nn.sigmoid(reward(x.chosen)) + jax.nn.sigmoid(-beta * x.apart)

    return PairLoss(beta, apply)
