"""f-DPO (arXiv:2309.16240): DPO for other divergences from the reference than the reverse KL.

The loss is -log sigmoid(beta (f'(chosen) - f'(rejected))), where f' is the derivative of the
divergence's generator at a completion's ratio of learner to reference. DPO's f' is the log-ratio.
Log-ratios of completions are clamped to +-20 where they are exponentiated, and have no gradient
beyond; constants of f' cancel.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl.losses.formulas import with_formula
from jaxrl.losses.preference.pairs import PairLoss, ScoredCompletion, ScoredPair
from jaxrl.losses.ratios import LOG_RATIO_LIMIT


@with_formula
def forward_kl(*, beta: float = 0.1) -> PairLoss:
    """f-DPO with the forward KL divergence: f' = -reference / learner.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> f"{forward_kl(beta=0.5).apply(pair):.3f}"  # softplus(0.5 (e^-1 - e^1))
      '0.269'
    """
    return _f_dpo(beta, lambda d: -jnp.exp(-d))


@with_formula
def js_divergence(*, beta: float = 0.1) -> PairLoss:
    """f-DPO with the Jensen-Shannon divergence: f' = log sigmoid(log learner / reference), which is
    bounded above: a completion need not become more likely without end.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> f"{js_divergence(beta=0.5).apply(pair):.3f}"  # softplus(-0.5 (-0.313 + 1.313))
      '0.474'
    """
    return _f_dpo(beta, jax.nn.log_sigmoid)


@with_formula
def alpha_divergence(*, beta: float = 0.1, alpha: float = 0.5) -> PairLoss:
    """f-DPO with the alpha divergence: f' = (1 - (learner / reference)^-alpha) / alpha. Towards 0
    it is DPO, and at 1 `forward_kl`. TRL's f_alpha_divergence_coef is 1 - alpha.

    Example:
      >>> pair = ScoredPair(ScoredCompletion(-4.0, -5.0, 4.0), ScoredCompletion(-3.0, -2.0, 2.0))
      >>> f"{alpha_divergence(beta=0.5).apply(pair):.3f}"  # softplus(e^-0.5 - e^0.5)
      '0.302'

    Raises:
      ValueError: unless 0 < alpha <= 1.
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha={alpha} must be > 0 and <= 1")
    return _f_dpo(beta, lambda d: -jnp.expm1(-alpha * d) / alpha)


def _f_dpo(beta: float, slope: Callable[[jax.Array], jax.Array]) -> PairLoss:
    """Makes a loss from f' as a function of the log-ratio."""

    def clamped(completion: ScoredCompletion) -> jax.Array:
        return jnp.clip(completion.log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def apply(x: ScoredPair) -> jax.Array:
        return -jax.nn.log_sigmoid(beta * (slope(clamped(x.chosen)) - slope(clamped(x.rejected))))

    return PairLoss(beta, apply)
