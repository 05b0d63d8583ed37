"""Weighted sums of reward functions over many completions; a failure is NaN, never 0."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.core import plugins
from jaxrl.environments.isolation.calls import call_each
from jaxrl.environments.rewards import builtin

RewardFn = Callable[..., Any]  # `def` or `async def`

_BATCHED = "_jaxrl_batched"


class Reward(NamedTuple):
    """One term of the reward."""

    name: str  # for metrics and messages
    function: RewardFn  # (completion, example) -> number, or marked by `batched`
    weight: float  # its factor in the sum
    timeout: float = 60.0  # seconds for each call


class Scores(NamedTuple):
    """Rewards of N completions."""

    total: np.ndarray  # f64[N], weighted; NaN where a function failed, so that training ignores it
    components: dict[str, np.ndarray]  # f64[N] for each reward name, before the weight
    failures: dict[str, int]  # number of failed completions for each reward name
    first_failure: str | None  # message for the log


def batched(function: RewardFn) -> RewardFn:
    """Marks a reward function of all completions: (list[str], list[Mapping]) -> N numbers."""
    setattr(function, _BATCHED, True)
    return function


def load_rewards(
    paths: Sequence[str], weights: Sequence[float] = (), *, timeout: float = 60.0
) -> list[Reward]:
    """Loads the reward functions of `reward.path`, with weights or 1 each; raises ValueError for a
    function that cannot be loaded, or two of the same name."""
    functions = [plugins.load_function(p, builtin=builtin, key="reward.path") for p in paths]
    names = [path.rpartition(":")[2] for path in paths]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(
            f"reward.path names {twice[0]!r} twice; rename one, as metrics use the name"
        )
    terms = zip(names, functions, weights or [1.0] * len(names), strict=True)
    return [Reward(*term, timeout) for term in terms]


def score(
    terms: Sequence[Reward], completions: Sequence[str], examples: Sequence[Mapping[str, Any]]
) -> Scores:
    """Applies every reward function to every completion.

    A function that raises, times out or returns no finite number fails on that completion: the
    reward is NaN and the failure is counted. A batched function fails on all completions at once.
    """
    scores = Scores(np.zeros(len(completions)), {}, {}, None)
    for term in terms:
        values, failure = np.full(len(completions), np.nan), None
        for i, returned in enumerate(_apply(term, completions, examples)):
            value = _finite(returned)
            if isinstance(value, float):
                values[i] = value
            else:
                text = completions[i][:80]
                failure = failure or f"reward {term.name} failed on completion {text!r}: {value!r}"
        scores = with_component(
            scores, term.name, values=values, weight=term.weight, failure=failure
        )
    return scores


def with_component(
    scores: Scores, name: str, *, values: np.ndarray, weight: float, failure: str | None = None
) -> Scores:
    """Adds a reward: values f64[N], NaN where it failed, and the message of its first failure."""
    failed = int(np.isnan(values).sum())
    if failed and failure is None:
        failure = f"reward {name} is not finite on {failed} completions"
    return Scores(
        scores.total + weight * values,
        {**scores.components, name: values},
        {**scores.failures, name: failed},
        scores.first_failure or failure,
    )


def _apply(
    term: Reward, completions: Sequence[str], examples: Sequence[Mapping[str, Any]]
) -> Sequence[Any]:
    """Returns what the function returned or raised for each completion."""
    if not hasattr(term.function, _BATCHED):
        pairs = list(zip(completions, examples, strict=True))
        return call_each(term.function, pairs, timeout=term.timeout)
    batch = (list(completions), list(examples))
    (returned,) = call_each(term.function, [batch], timeout=term.timeout)
    if not isinstance(returned, BaseException):
        try:
            returned = list(returned)
        except Exception as error:
            returned = error
    if isinstance(returned, list) and len(returned) != len(completions):
        returned = ValueError(f"{len(returned)} rewards for {len(completions)} completions")
    return returned if isinstance(returned, list) else [returned] * len(completions)


def _finite(returned: Any) -> float | BaseException:
    """Converts what a function returned to a finite number, or to the error that prevents it."""
    if isinstance(returned, BaseException):
        return returned
    try:
        number = float(returned)
    except Exception as error:
        return error
    return number if math.isfinite(number) else ValueError(f"{number} is not a finite number")
