"""What an advantage estimator may see of the answers of a rollout."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

Advantages = np.ndarray | Sequence[np.ndarray]
"""f32[N], one number for each answer, or for each answer f32[C], one for each of its tokens."""


def _no_greedy() -> np.ndarray:
    raise ValueError("the estimator asks for greedy answers and none can be sampled here")


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """N answers and what they earned.

    Attributes:
      rewards: f64[N], the whole reward of each answer; NaN where it could not be computed.
      groups: i[N], index of the prompt.
      action_masks: for each answer bool[C], which of its tokens the policy chose.
      components: for each reward function its own values, f64[N], before the weight.
      weights: for each reward function its weight.
      penalties: for each answer f64[C], what was taken from the reward at each of its tokens for
        distance from the reference (`rewards` has their sum); None if there is no such penalty.
      values: for each answer f32[C], what a critic expected before each of its tokens; None without
        a critic.
      turns: for each answer where each turn begins and ends, and what the environment gave for it
        (`rewards` has their sum); None if answers have a single turn.
      greedy: () -> f64[N], the reward of the greedy answer to each answer's prompt. It is sampled
        only if it is asked for.
    """

    rewards: np.ndarray
    groups: np.ndarray
    action_masks: Sequence[np.ndarray]
    components: Mapping[str, np.ndarray] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    penalties: Sequence[np.ndarray] | None = None
    values: Sequence[np.ndarray] | None = None
    turns: Sequence[Sequence[tuple[int, int, float]]] | None = None
    greedy: Callable[[], np.ndarray] = _no_greedy

    @property
    def lengths(self) -> np.ndarray:
        """i[N], tokens that the policy chose."""
        return np.array([int(np.sum(mask)) for mask in self.action_masks], int)

    def token_rewards(self) -> list[np.ndarray]:
        """For each answer f64[C]: minus the penalty at each token that the policy chose, what the
        environment gave for a turn at its last token, and at the last token of all the rest of the
        reward; NaN rewards give 0."""
        found = []
        for i, mask in enumerate(self.action_masks):
            rewards = np.zeros(len(mask))
            chosen = np.flatnonzero(mask)
            if chosen.size and not np.isnan(self.rewards[i]):
                if self.penalties is not None:
                    rewards[chosen] = -np.asarray(self.penalties[i], float)[chosen]
                for _, end, earned in () if self.turns is None else self.turns[i]:
                    rewards[end - 1] += earned
                rewards[chosen[-1]] += self.rewards[i] - rewards.sum()
            found.append(rewards)
        return found


class FromRewards(Protocol):
    """(rewards f[N], groups i[N]) -> advantages f32[N]."""

    def __call__(self, rewards: np.ndarray, groups: np.ndarray, /) -> np.ndarray:
        """Of the reward of each answer and the index of its group."""
        ...


class FromOutcomes(Protocol):
    """Everything that is known of the answers -> advantages."""

    def __call__(self, outcomes: Outcomes, /) -> Advantages:
        """f32[N], or f32[C] for each answer."""
        ...


AdvantageEstimator = FromRewards | FromOutcomes


E = TypeVar("E", bound=Callable[..., Advantages])


def within_group(estimator: E) -> E:
    """Marks an estimator that compares an answer with the others to its prompt, so that a run with
    one answer to each prompt is refused."""
    estimator.within_group = True  # pyright: ignore[reportFunctionMemberAccess]
    return estimator


def by_component(estimator: E) -> E:
    """Marks an estimator that reads the components of the reward and not their sum, so that a run
    that takes something from the sum alone is refused."""
    estimator.by_component = True  # pyright: ignore[reportFunctionMemberAccess]
    return estimator


def compares_group(estimator: AdvantageEstimator) -> bool:
    """Whether `within_group` marked the estimator, or what a `functools.partial` of it is made
    of."""
    return _marked(estimator, "within_group")


def reads_components(estimator: AdvantageEstimator) -> bool:
    """Likewise for `by_component`."""
    return _marked(estimator, "by_component")


def _marked(estimator: AdvantageEstimator, mark: str) -> bool:
    while isinstance(estimator, functools.partial):
        estimator = estimator.func
    return getattr(estimator, mark, False)


def estimate(estimator: AdvantageEstimator, outcomes: Outcomes) -> Advantages:
    """Applies an estimator: one with two parameters is given rewards and groups, one with a single
    parameter everything. Parameters with a default do not count.

    Raises:
      ValueError: if it takes another number of parameters, or does not return one advantage for
        each answer.
    """
    required = [
        p
        for p in inspect.signature(estimator).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) == 1:
        found = estimator(outcomes)  # pyright: ignore[reportCallIssue, reportArgumentType]
    elif len(required) == 2:
        found = estimator(outcomes.rewards, outcomes.groups)  # pyright: ignore[reportCallIssue, reportArgumentType]
    else:
        raise ValueError(
            f"the advantage estimator {_name(estimator)} needs {len(required)} arguments; it is "
            "given (rewards, groups), or (outcomes) if it takes one"
        )
    if len(found) != len(outcomes.rewards):
        raise ValueError(
            f"the advantage estimator {_name(estimator)} returned {len(found)} advantages for "
            f"{len(outcomes.rewards)} answers"
        )
    return found


def _name(estimator: AdvantageEstimator) -> str:
    return getattr(estimator, "__name__", repr(estimator))
