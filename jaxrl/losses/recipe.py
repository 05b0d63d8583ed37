"""Recipes: algorithms as a learner's objective and an estimator of advantages."""

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxrl.advantages import AdvantageEstimator
from jaxrl.losses import bounds, operands
from jaxrl.losses.algebra import TokenLoss, Weights, both, reweight
from jaxrl.losses.controllers import Controller, EntropyController, KLController, controlled
from jaxrl.losses.formulas import formula_text
from jaxrl.losses.imitation import (
    completion_likelihood,
    observation_likelihood,
    positive_likelihood,
)
from jaxrl.losses.objectives import Aggregation, Objective, objective
from jaxrl.losses.ratios import Ratio
from jaxrl.losses.regularizers import KLEstimator, entropy_bonus, k3, kl_penalty, load_balance
from jaxrl.losses.selections import top_entropy
from jaxrl.losses.value import Critic


@dataclass(frozen=True, repr=False)
class Recipe:
    """An algorithm. It prints as its formula; terms are added to it as to a loss.

    `dataclasses.replace(recipe, advantages=...)` exchanges the estimator.

    Example:
      >>> from jaxrl.losses import kl_penalty, max_rl
      >>> max_rl() + 0.001 * kl_penalty()
      Recipe(objective(clipped(over_sampler, low=0.2, high=0.2) + 0.001 * kl_penalty(k3),
                       token_mean), max_rl)

    Raises:
      TypeError: for an objective that is not one.
    """

    objective: Objective  # the quantity that the learner minimises
    advantages: AdvantageEstimator  # rewards -> advantages
    # Controllers of the coefficients that follow a metric, by name.
    controllers: Mapping[str, Controller] = dataclasses.field(default_factory=dict, hash=False)
    critic: Critic | None = None  # the critic that the advantages read

    def __post_init__(self) -> None:
        if not isinstance(self.objective, Objective):
            raise TypeError(
                f"Recipe: {formula_text(self.objective)} is not an Objective; write "
                "objective(loss, token_mean)"
            )

    def __repr__(self) -> str:
        fields = [repr(self.objective), formula_text(self.advantages)]
        if self.controllers:
            fields.append(f"controllers={dict(self.controllers)!r}")
        if self.critic is not None:
            fields.append(f"critic={self.critic!r}")
        return f"Recipe({', '.join(fields)})"

    def __add__(self, term: TokenLoss | Objective) -> "Recipe":
        return dataclasses.replace(self, objective=self.objective + term)

    def __radd__(self, other: int) -> "Recipe":
        if not (isinstance(other, int) and other == 0):  # sum() begins with 0
            raise TypeError(operands.mistake("add", self, to=other))
        return self

    def __sub__(self, term: TokenLoss | Objective) -> "Recipe":
        return dataclasses.replace(self, objective=self.objective - term)

    def __mul__(self, other: Any) -> NoReturn:
        raise TypeError(operands.mistake("multiply", self, to=other))

    __rmul__ = __mul__


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Terms that any recipe takes: in a config the shared keys of the table [loss].

    A term whose coefficient is 0 is left out, and so are the scores that it needs.

    Attributes:
      correction: weights of the policy term; the terms below are not weighted.
      rejection: weights; a token with weight 0 leaves the batch before the update: the loss, its
        denominator and the means over sequences (as in veRL). It costs a forward pass.
      top_entropy: share of the batch's tokens to which the policy term applies: those where the
        learner's entropy is highest (.2 in arXiv:2506.01939). It costs a forward pass.
      kl: coefficient of the divergence from the reference model (.04 in GRPO's paper). In long
        runs without it others saw gradient norms that grow slowly, and .001 prevented it; 10,000
        steps of a small task did not show it (docs/results/operating.md).
      kl_estimator: the estimator of the divergence.
      kl_ratio: importance ratio that the estimate is multiplied by; none by default.
      kl_target: divergence per token, in nats, towards which `kl` is moved after each rollout; none
        keeps it fixed.
      kl_step: factor of the relative change of `kl` after a rollout; the divergence moves it by at
        most a fifth of this (arXiv:1909.08593).
      entropy: coefficient of the entropy bonus.
      entropy_target: entropy per token, in nats, towards which the coefficient is moved after each
        rollout, starting from `entropy`; none keeps it fixed (.2 in Skywork-OR1).
      entropy_step: change of that coefficient after each rollout.
      positive_nll: coefficient of the mean -log pi over the tokens of completions whose reward is
        positive (.1 in VAPO, arXiv:2504.05118).
      nll: coefficient of the mean -log pi over all tokens that the policy chose, with a count of
        its own: `rejection` does not change it.
      observation_nll: coefficient of the mean -log pi over the tokens that the environment wrote
        (.05 in ECHO, arXiv:2605.24517).
      balance: coefficient of the imbalance of a mixture of experts.
      aggregation: reduction of tokens to one number; the recipe's own by default. `fixed_length`
        divides by sequences times the longest completion, as dr_grpo does.
      advantage_eps: added to a standard deviation before the advantage is divided by it; the
        estimator's own by default (1e-6 within a group; TRL 1e-4, oat 1e-8).

    Raises:
      ValueError: for a negative coefficient.
    """

    correction: Weights | None = None
    rejection: Weights | None = None
    top_entropy: float | None = None
    kl: float = 0.0
    kl_estimator: KLEstimator = k3
    kl_ratio: Ratio | None = None
    kl_target: float | None = None
    kl_step: float = 0.1
    entropy: float = 0.0
    entropy_target: float | None = None
    entropy_step: float = 0.005
    positive_nll: float = 0.0
    nll: float = 0.0
    observation_nll: float = 0.0
    balance: float = 0.0
    aggregation: Aggregation | None = None
    advantage_eps: float | None = None

    def __post_init__(self) -> None:
        for name in ("kl", "entropy", "positive_nll", "nll", "observation_nll", "balance"):
            bounds.not_negative(name, getattr(self, name))


def with_terms(recipe: Recipe, **terms: Any) -> Recipe:
    """Adds terms to a recipe; the keywords are the attributes of `Terms`.

    Example:
      >>> from jaxrl.losses import opo
      >>> with_terms(opo(), kl=0.001, entropy=0.01)
      Recipe(objective(unclipped(on_policy) + 0.001 * kl_penalty(k3) + 0.01 * entropy_bonus(),
                       token_mean), opo)

    Raises:
      ValueError: for a negative coefficient, a correction for a change of policy that the recipe's
        ratio accounts for already, or an eps for an advantage that takes none.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"with_terms: {formula_text(recipe)} is not a Recipe; write a recipe such as grpo(), "
            "or Recipe(objective(loss, token_mean), group_relative)"
        )
    add, goal = Terms(**terms), recipe.objective
    loss, estimator, controllers = goal.loss, recipe.advantages, dict(recipe.controllers)
    if add.correction is not None:
        loss = reweight(loss, add.correction)
    if add.top_entropy is not None:
        loss = reweight(loss, top_entropy(add.top_entropy))
    if add.kl_target is not None:
        controllers["kl"] = KLController(initial=add.kl, target=add.kl_target, step=add.kl_step)
    if add.entropy_target is not None:
        controllers["entropy"] = EntropyController(
            initial=add.entropy, target=add.entropy_target, step=add.entropy_step
        )
    for name, term in {
        "kl": kl_penalty(add.kl_estimator, ratio=add.kl_ratio),
        "entropy": entropy_bonus(),
        "balance": load_balance(),
    }.items():
        if getattr(add, f"{name}_target", None) is not None:
            loss = loss + controlled(term, name)
        elif coefficient := getattr(add, name):
            loss = loss + coefficient * term
    goal = dataclasses.replace(
        goal, loss=loss, aggregation=add.aggregation or goal.aggregation, formula=""
    )
    if add.rejection is not None:
        among = add.rejection if goal.among is None else both(goal.among, add.rejection)
        checked = objective(goal.loss, goal.aggregation, among=among)
        goal = dataclasses.replace(goal, among=checked.among)
    if add.positive_nll:
        goal = goal + add.positive_nll * positive_likelihood()
    if add.nll:
        goal = goal + add.nll * completion_likelihood()
    if add.observation_nll:
        goal = goal + add.observation_nll * observation_likelihood()
    if add.advantage_eps is not None:
        estimator = _with_eps(estimator, add.advantage_eps)
    return dataclasses.replace(
        recipe, objective=goal, advantages=estimator, controllers=controllers
    )


def _with_eps(estimator: AdvantageEstimator, eps: float) -> AdvantageEstimator:
    bounds.positive("advantage_eps", eps)
    if "eps" not in inspect.signature(estimator).parameters:
        raise ValueError(
            f"advantage_eps={eps}: the advantage {formula_text(estimator)} takes no eps; leave it "
            "out"
        )
    return functools.partial(estimator, eps=eps)
