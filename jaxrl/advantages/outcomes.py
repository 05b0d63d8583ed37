"""Outcomes: completions and their rewards, the input of an advantage estimator."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

Advantages = np.ndarray | Sequence[np.ndarray]
"""f32[N], one number per completion, or for each completion f32[C], one per token."""


def _no_greedy() -> np.ndarray:
    raise ValueError(
        "the estimator asks for greedy completions, and outcomes.greedy is not set: give Outcomes "
        "a function greedy() that returns their rewards"
    )


def _no_energies() -> Sequence[np.ndarray]:
    raise ValueError(
        "the estimator asks for the energies of tokens, and outcomes.energies is not set: give "
        "Outcomes a function energies() that returns f[C] for each completion"
    )


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """N completions and their rewards.

    Attributes:
      rewards: f64[N], the whole reward of each completion; NaN where it could not be computed.
      groups: i[N], index of the prompt.
      action_masks: for each completion bool[C], True at tokens that the policy chose.
      components: for each reward function its values, f64[N], before the weight.
      weights: for each reward function its weight.
      penalties: for each completion f64[C], the penalty at each token for distance from the
        reference (`rewards` has their sum); None without one.
      values: for each completion f32[C], a critic's expectation before each token; None without a
        critic.
      cuts: f64[N], the critic's expectation after the last token of each truncated completion, 0
        for one that ended; None if all ended.
      turns: for each completion the begin and end of each turn, and the environment's reward for it
        (`rewards` has their sum); None if completions have a single turn.
      greedy: () -> f64[N], the reward of each prompt's greedy completion, sampled on demand.
      energies: () -> for each completion f[C], the squared norm of the gradient of each token's
        log-prob by the logits, computed on demand (`Learner.energies`).
      episodes: i[N] = 0, 0, 1, ..., the episode of each completion, where an episode has several
        sequences. Its reward is then their sum. None if each completion is an episode.

    Example:
      >>> masks = [np.array([True, True, False, True])]
      >>> outcomes = Outcomes(rewards=np.array([2.0]), groups=np.array([7]), action_masks=masks)
      >>> outcomes.lengths.tolist(), outcomes.token_rewards()[0].tolist()
      ([3], [0.0, 0.0, 0.0, 2.0])
    """

    rewards: np.ndarray
    groups: np.ndarray
    action_masks: Sequence[np.ndarray]
    components: Mapping[str, np.ndarray] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    penalties: Sequence[np.ndarray] | None = None
    values: Sequence[np.ndarray] | None = None
    cuts: np.ndarray | None = None
    turns: Sequence[Sequence[tuple[int, int, float]]] | None = None
    greedy: Callable[[], np.ndarray] = _no_greedy
    energies: Callable[[], Sequence[np.ndarray]] = _no_energies
    episodes: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        """Numbers of tokens that the policy chose, i[N]."""
        return np.array([np.sum(mask) for mask in self.action_masks], int)

    @property
    def counted(self) -> list[np.ndarray]:
        """The tokens that the policy chose in completions whose reward is known: bool[C] each."""
        known = ~np.isnan(self.rewards)
        return [np.asarray(m, bool) & k for m, k in zip(self.action_masks, known, strict=True)]

    def token_rewards(self) -> list[np.ndarray]:
        """Divides each reward over its tokens, f64[C] for each completion.

        A token that the policy chose gets minus its penalty, the last token of a turn the
        environment's reward for the turn, and the very last token the rest, with the rewards of
        turns that another sequence of the episode trains. NaN rewards give 0.
        """
        found = []
        for i, mask in enumerate(self.action_masks):
            rewards = np.zeros(len(mask))
            chosen = np.flatnonzero(mask)
            if chosen.size and not np.isnan(self.rewards[i]):
                if self.penalties is not None:
                    rewards[chosen] = -np.asarray(self.penalties[i], float)[chosen]
                for _, end, earned in () if self.turns is None else self.turns[i]:
                    rewards[end - 1] += earned * bool(mask[end - 1])
                rewards[chosen[-1]] += self.rewards[i] - rewards.sum()
            found.append(rewards)
        return found


AdvantageEstimator = (
    Callable[[np.ndarray, np.ndarray], np.ndarray] | Callable[[Outcomes], Advantages]
)
"""(rewards f[N], groups i[N]) -> advantages f32[N], or (outcomes) -> advantages."""

E = TypeVar("E", bound=Callable[..., Advantages])


def within_group(estimator: E) -> E:
    """Marks an estimator that compares the completions of a prompt: a run with one completion per
    prompt is refused.

    Example:
      >>> @within_group
      ... def above_mean(rewards, groups):
      ...     return rewards - rewards.mean()
      >>> is_marked(above_mean, within_group)
      True
    """
    setattr(estimator, within_group.__name__, True)
    return estimator


def by_component(estimator: E) -> E:
    """Marks an estimator that reads the components of the reward and not their sum: a run with a
    penalty on the sum alone is refused.

    Example:
      >>> @by_component
      ... def only_the_first(outcomes):
      ...     return next(iter(outcomes.components.values()))
      >>> is_marked(only_the_first, by_component)
      True
    """
    setattr(estimator, by_component.__name__, True)
    return estimator


def is_marked(estimator: AdvantageEstimator, mark: Callable[[Any], Any]) -> bool:
    """Returns True if `mark` marked the estimator, or the function of a partial one.

    Example:
      >>> from jaxrl.advantages import gdpo, group_relative, remax
      >>> is_marked(functools.partial(group_relative, eps=1e-4), within_group)
      True
      >>> is_marked(remax, within_group), is_marked(gdpo, by_component)
      (False, True)
    """
    while isinstance(estimator, functools.partial):
        estimator = estimator.func
    return getattr(estimator, mark.__name__, False)


def per_episode(function: Callable[[Outcomes], Advantages], outcomes: Outcomes) -> Advantages:
    """Applies a function to whole episodes: the sequences of one are joined in their order, and the
    result is divided among them. A result of one number counts for all of them.

    Example:
      >>> masks = [np.ones(2, bool), np.ones(1, bool), np.ones(1, bool)]
      >>> rewards, groups = np.array([0.0, 1.0, 0.0]), np.array([7, 7, 7])
      >>> outcomes = Outcomes(
      ...     rewards=rewards, groups=groups, action_masks=masks, episodes=np.array([0, 0, 1])
      ... )
      >>> per_episode(lambda whole: whole.rewards - whole.rewards.mean(), outcomes)
      array([ 0.5,  0.5, -0.5])
    """
    episodes = outcomes.episodes
    if episodes is None:
        return function(outcomes)
    found = function(_joined(outcomes, episodes))
    if isinstance(found, np.ndarray) and found.ndim == 1:
        return found[episodes]
    ends = np.cumsum([len(mask) for mask in outcomes.action_masks])[:-1]
    return np.split(np.concatenate([np.asarray(one) for one in found]), ends)


def _joined(outcomes: Outcomes, episodes: np.ndarray) -> Outcomes:
    """Returns the outcomes of whole episodes."""
    count = int(episodes[-1]) + 1
    parts = [np.flatnonzero(episodes == episode).tolist() for episode in range(count)]
    last = np.array([part[-1] for part in parts])

    def joined(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.concatenate([np.asarray(arrays[i]) for i in part]) for part in parts]

    turns = None
    if outcomes.turns is not None:
        sizes, turns = [len(mask) for mask in outcomes.action_masks], list[list[Any]]()
        for part in parts:
            starts = np.cumsum([0, *(sizes[i] for i in part)])
            turns.append(
                [
                    (int(begin + start), int(end + start), earned)
                    for start, i in zip(starts, part, strict=False)
                    for begin, end, earned in outcomes.turns[i]
                ]
            )
    return replace(
        outcomes,
        rewards=np.bincount(episodes, outcomes.rewards, minlength=count),
        groups=np.asarray(outcomes.groups)[last],
        action_masks=joined(outcomes.action_masks),
        components={
            name: np.bincount(episodes, values, minlength=count)
            for name, values in outcomes.components.items()
        },
        penalties=None if outcomes.penalties is None else joined(outcomes.penalties),
        values=None if outcomes.values is None else joined(outcomes.values),
        cuts=None if outcomes.cuts is None else outcomes.cuts[last],
        turns=turns,
        greedy=lambda: outcomes.greedy()[last],
        energies=lambda: joined(outcomes.energies()),
        episodes=None,
    )


def estimate(estimator: AdvantageEstimator, outcomes: Outcomes) -> Advantages:
    """Applies an estimator: one with two parameters is given rewards and groups, one with a single
    parameter the outcomes. Parameters with a default do not count. Episodes of several sequences
    are estimated whole, see `per_episode`.

    Example:
      >>> from jaxrl.advantages import centred
      >>> rewards, masks = np.array([1.0, 0.0]), [np.ones(1, bool)] * 2
      >>> outcomes = Outcomes(rewards=rewards, groups=np.array([7, 7]), action_masks=masks)
      >>> estimate(centred, outcomes), estimate(lambda outcomes: outcomes.rewards, outcomes)
      (array([ 0.5, -0.5], dtype=float32), array([1., 0.]))

    Raises:
      ValueError: if it takes another number of parameters, or does not return one advantage for
        each completion, or for each of its tokens.
    """
    if outcomes.episodes is not None:
        return per_episode(lambda whole: estimate(estimator, whole), outcomes)
    required = [
        p
        for p in inspect.signature(estimator).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    name = getattr(estimator, "__name__", repr(estimator))
    ways: dict[int, tuple[Any, ...]] = {1: (outcomes,), 2: (outcomes.rewards, outcomes.groups)}
    given = ways.get(len(required))
    if given is None:
        raise ValueError(
            f"the advantage estimator {name} needs {len(required)} arguments; write "
            "one that takes (rewards, groups), or (outcomes)"
        )
    found = estimator(*given)
    if len(found) != len(outcomes.rewards):
        raise ValueError(
            f"the advantage estimator {name} returned {len(found)} advantages for "
            f"{len(outcomes.rewards)} completions; return one for each"
        )
    for i, (one, mask) in enumerate(zip(found, outcomes.action_masks, strict=True)):
        if np.ndim(one) and len(one) != len(mask):
            raise ValueError(
                f"the advantage estimator {name} returned {len(one)} advantages for the "
                f"{len(mask)} tokens of completion {i}; return one for each token, or one number"
            )
    # A list of numbers, or an array of JAX, is an array here: `per_episode` tells it from a list of
    # arrays.
    return found if any(np.ndim(one) for one in found) else np.asarray(found)
