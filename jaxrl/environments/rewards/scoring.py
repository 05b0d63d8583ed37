"""Rewards of many answers: weighted, added, and never silently 0 when a function fails."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.core import plugins
from jaxrl.environments.isolation.calls import call_each
from jaxrl.environments.rewards import builtin

RewardFn = Callable[..., Any]

_BATCHED = "_jaxrl_batched"


class Reward(NamedTuple):
    """One term of the reward.

    Attributes:
      name: for metrics and messages.
      function: of one answer and its example, or marked by `batched`; `def` or `async def`.
      weight: of its values in the sum.
      timeout: seconds that a call may take.
    """

    name: str
    function: RewardFn
    weight: float
    timeout: float = 60.0


class Scored(NamedTuple):
    """Rewards of N answers.

    Attributes:
      total: f64[N], the weighted sum; NaN where a function failed, to be left out of training.
      parts: for each function its own values, f64[N], before the weight.
      failures: for each function the number of answers on which it failed.
      first_failure: what the first failure was, for the log; None without one.
    """

    total: np.ndarray
    parts: dict[str, np.ndarray]
    failures: dict[str, int]
    first_failure: str | None


def batched(function: RewardFn) -> RewardFn:
    """Marks a reward that takes all answers at once: a decorator of
    `(completions: list[str], examples: list[Mapping]) -> one number for each`."""
    setattr(function, _BATCHED, True)
    return function


def load_rewards(
    paths: Sequence[str], weights: Sequence[float] = (), *, timeout: float = 60.0
) -> list[Reward]:
    """The rewards that `reward.path` and `reward.weights` name; no weights means 1 for each.

    Raises:
      ValueError: for a reference that cannot be loaded, or two rewards of one name.
    """
    functions = [plugins.load_function(p, builtin=builtin, key="reward.path") for p in paths]
    names = [path.rpartition(":")[2] for path in paths]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"reward.path names {twice[0]!r} twice; its parts could not be told apart")
    return [
        Reward(name, function, weight, timeout)
        for name, function, weight in zip(
            names, functions, weights or [1.0] * len(names), strict=True
        )
    ]


def score(
    terms: Sequence[Reward], completions: Sequence[str], examples: Sequence[Mapping[str, Any]]
) -> Scored:
    """Applies every reward to every answer.

    A function that raises, takes too long, or returns something that is no finite number, has
    failed on that answer: the answer's reward is NaN and the failure is counted. One that takes all
    answers at once fails on all of them.
    """
    parts: dict[str, np.ndarray] = {}
    failures: dict[str, int] = {}
    first_failure = None
    for term in terms:
        values = np.full(len(completions), np.nan)
        for i, found in enumerate(_apply(term, completions, examples)):
            value = _finite(found)
            if isinstance(value, float):
                values[i] = value
            else:
                first_failure = first_failure or (
                    f"reward {term.name} failed on the answer {completions[i][:80]!r}: {value!r}"
                )
        parts[term.name] = values
        failures[term.name] = int(np.isnan(values).sum())
    total = np.zeros(len(completions))
    for term in terms:
        total = total + term.weight * parts[term.name]
    return Scored(total, parts, failures, first_failure)


def with_part(scored: Scored, name: str, *, values: np.ndarray, weight: float) -> Scored:
    """The same answers with one more reward, f64[N], NaN where it could not be computed."""
    failed = int(np.isnan(values).sum())
    first_failure = scored.first_failure
    if failed and first_failure is None:
        first_failure = f"reward {name} is not finite on {failed} answers"
    return Scored(
        scored.total + weight * values,
        {**scored.parts, name: values},
        {**scored.failures, name: failed},
        first_failure,
    )


def _apply(
    term: Reward, completions: Sequence[str], examples: Sequence[Mapping[str, Any]]
) -> Sequence[Any]:
    """For each answer what the function returned, or the exception that it raised."""
    if not hasattr(term.function, _BATCHED):
        pairs = list(zip(completions, examples, strict=True))
        return call_each(term.function, pairs, timeout=term.timeout)
    everything = (list(completions), list(examples))
    (found,) = call_each(term.function, [everything], timeout=term.timeout)
    if isinstance(found, BaseException):
        return [found] * len(completions)
    try:
        values = list(found)
    except Exception as error:
        return [error] * len(completions)
    if len(values) != len(completions):
        wrong = ValueError(f"{len(values)} rewards for {len(completions)} answers")
        return [wrong] * len(completions)
    return values


def _finite(found: Any) -> float | BaseException:
    """What a function returned as a number, or why it is none."""
    if isinstance(found, BaseException):
        return found
    try:
        number = float(found)
    except Exception as error:
        return error
    return number if math.isfinite(number) else ValueError(f"{number} is not a finite number")
