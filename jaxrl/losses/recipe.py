"""An algorithm: what the learner minimises and how rewards become advantages."""

import functools
import inspect
from typing import NamedTuple

from jaxrl.advantages import AdvantageEstimator
from jaxrl.losses import bounds
from jaxrl.losses.algebra import Aggregation, Objective, Weights, objective, reweight
from jaxrl.losses.ratios import Ratio
from jaxrl.losses.regularizers import (
    EntropyController,
    KLEstimator,
    adaptive_entropy_bonus,
    entropy_bonus,
    k3,
    kl_penalty,
    load_balance,
    positive_likelihood,
)
from jaxrl.losses.value import Critic


class Recipe(NamedTuple):
    """An algorithm.

    Attributes:
      objective: what the learner minimises.
      advantages: rewards -> advantages; `recipe._replace(advantages=...)` exchanges it.
      entropy: what sets the coefficient of an adaptive entropy bonus; None without one.
      critic: what a critic is asked for; None without one.
    """

    objective: Objective
    advantages: AdvantageEstimator
    entropy: EntropyController | None = None
    critic: Critic | None = None


def with_terms(
    recipe: Recipe,
    *,
    correction: Weights | None = None,
    kl: float = 0.0,
    kl_estimator: KLEstimator = k3,
    kl_ratio: Ratio | None = None,
    entropy: float = 0.0,
    entropy_target: float | None = None,
    entropy_step: float = 0.005,
    positive_nll: float = 0.0,
    balance: float = 0.0,
    aggregation: Aggregation | None = None,
    advantage_eps: float | None = None,
) -> Recipe:
    """The recipe with more terms. A term whose coefficient is 0 is left out, and so are the scores
    that it needs.

    Args:
      recipe: any algorithm.
      correction: weights of the policy term; the terms below are not weighted.
      kl: coefficient of the divergence from the reference model (.04 in GRPO's paper). Long runs
        without it are reported to have slowly growing gradient norms, and .001 to prevent them;
        10,000 steps of a small task did not show it (docs/operating.md).
      kl_estimator: how it is estimated.
      kl_ratio: importance ratio that the estimate is multiplied by; none by default.
      entropy: coefficient of the entropy bonus.
      entropy_target: entropy per token, in nats, towards which the coefficient is moved after each
        rollout, starting from `entropy`; none keeps it fixed (.2 in Skywork-OR1).
      entropy_step: how far it is moved.
      positive_nll: coefficient of the likelihood of answers whose reward is positive.
      balance: coefficient of the imbalance of a mixture of experts.
      aggregation: how tokens become one number; the recipe's own by default. `fixed_length` divides
        by sequences times the longest answer, as dr_grpo does.
      advantage_eps: what the advantage adds to a standard deviation before it divides by it; the
        estimator's own by default (1e-6 within a group; TRL 1e-4, oat 1e-8).

    Raises:
      ValueError: for a negative coefficient, a correction for what the recipe's ratio accounts for
        already, or an eps for an advantage that takes none.
    """
    terms = {"kl": kl, "entropy": entropy, "positive_nll": positive_nll, "balance": balance}
    for name, value in terms.items():
        bounds.not_negative(name, value)
    loss, controller = recipe.objective.loss, recipe.entropy
    if correction is not None:
        loss = reweight(loss, correction)
    if kl:
        loss = loss + kl * kl_penalty(kl_estimator, ratio=kl_ratio)
    if entropy_target is not None:
        controller = EntropyController(initial=entropy, target=entropy_target, step=entropy_step)
        loss = loss + adaptive_entropy_bonus()
    elif entropy:
        loss = loss + entropy * entropy_bonus()
    if positive_nll:
        loss = loss + positive_nll * positive_likelihood()
    if balance:
        loss = loss + balance * load_balance()
    reduced = objective(loss, aggregation or recipe.objective.aggregation)
    estimator = recipe.advantages
    if advantage_eps is not None:
        estimator = _with_eps(estimator, advantage_eps)
    return recipe._replace(objective=reduced, advantages=estimator, entropy=controller)


def _with_eps(estimator: AdvantageEstimator, eps: float) -> AdvantageEstimator:
    bounds.positive("advantage_eps", eps)
    if "eps" not in inspect.signature(estimator).parameters:
        name = getattr(estimator, "__name__", repr(estimator))
        raise ValueError(f"advantage_eps={eps}: the advantage {name} takes no eps; leave it out")
    return functools.partial(estimator, eps=eps)
