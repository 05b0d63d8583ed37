"""Weighted sums of reward functions over many completions; a failure is NaN, never 0."""

import copy
import functools
import inspect
import itertools
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrl.core import plugins
from jaxrl.environments.isolation.calls import call_each
from jaxrl.environments.isolation.places import describe
from jaxrl.environments.rewards import builtin
from jaxrl.environments.rewards.batches import RewardFn, is_batched

_LARGEST = 1e30  # the learner computes in f32


class RewardTerm(Protocol):
    """One term of the reward: a `Reward`, or one whose function another process calls."""

    @property
    def name(self) -> str:
        """Its name in metrics and messages."""
        ...

    @property
    def weight(self) -> float:
        """Its factor in the sum."""
        ...

    @property
    def takes_all(self) -> bool:
        """True if its function takes all completions at once."""
        ...

    def apply(
        self, completions: Sequence[str], examples: Sequence[Mapping[str, Any]]
    ) -> Sequence[float | str]:
        """Returns the value of each completion, without the weight, or the text of its failure."""
        ...


class Reward(NamedTuple):
    """One term of the reward, whose function this process calls."""

    name: str  # for metrics and messages
    function: RewardFn  # (completion, example) -> number, or marked by `batched`
    weight: float  # its factor in the sum
    timeout: float = 60.0  # seconds per call

    @property
    def takes_all(self) -> bool:
        """True if its function takes all completions at once."""
        return is_batched(self.function)

    def apply(
        self, completions: Sequence[str], examples: Sequence[Mapping[str, Any]]
    ) -> list[float | str]:
        """Returns the value of each completion, without the weight, or the text of its failure.
        Each call gets its own copy of the example."""
        return [
            value if isinstance(value, float) else describe(value, function=self.function)
            for value in _apply(self, completions, examples)
        ]


class RewardScores(NamedTuple):
    """Rewards of N completions."""

    # f64[N], weighted; NaN where a function with a weight failed, so that training ignores it.
    total: np.ndarray
    components: dict[str, np.ndarray]  # f64[N] for each reward name, before the weight
    failures: dict[str, int]  # number of failed completions for each reward name
    first_failure: str | None  # message for the log


def load_rewards(
    paths: Sequence[str],
    weights: Sequence[float] = (),
    *,
    timeout: float = 60.0,
    key: str = "reward.path",
) -> list[Reward]:
    """Loads the reward functions that the key `key` of a config names, with weights or 1 each;
    raises ValueError for a function that cannot be loaded, or two of the same name."""
    functions = [plugins.load_function(p, builtin=builtin, key=key) for p in paths]
    for path, function in zip(paths, functions, strict=True):
        _check_signature(function, named=f"{key} = {path!r}")
    names = [path.rpartition(":")[2] for path in paths]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{key} names {twice[0]!r} twice; rename one, as metrics use the name")
    terms = zip(names, functions, weights or [1.0] * len(names), strict=True)
    return [Reward(*term, timeout) for term in terms]


def _check_signature(function: RewardFn, *, named: str) -> None:
    try:
        inspect.signature(function).bind("", {})
    except TypeError as error:
        raise ValueError(
            f"{named}: it must take two arguments, a completion and an example, but "
            f"calling it with two fails: {error}"
        ) from error
    except ValueError:  # some functions in C have no known parameters
        pass


def score(
    terms: Sequence[RewardTerm], completions: Sequence[str], examples: Sequence[Mapping[str, Any]]
) -> RewardScores:
    """Applies every reward function to every completion.

    A function that raises, times out or returns anything but a number within +-1e30, also after the
    weight, fails on that completion: the reward is NaN and the failure is counted. A batched
    function that raises fails on all completions. Each call gets its own copy of the example.
    """
    scores = RewardScores(np.zeros(len(completions)), {}, {}, None)
    for term in terms:
        values, failure = np.full(len(completions), np.nan), None
        for i, value in enumerate(term.apply(completions, examples)):
            if isinstance(value, float):
                values[i] = value
            else:
                failure = failure or (
                    f"reward {term.name} failed on completion {completions[i][:80]!r}: {value}"
                )
        scores = with_component(
            scores, term.name, values=values, weight=term.weight, failure=failure
        )
    return scores


def with_component(
    scores: RewardScores,
    name: str,
    *,
    values: np.ndarray,
    weight: float,
    failure: str | None = None,
) -> RewardScores:
    """Adds a reward: values f64[N], NaN where it failed, and the message of its first failure. With
    weight 0 it is only watched: it adds 0 to the total even where it failed."""
    with np.errstate(over="ignore", invalid="ignore"):
        wrong = ~(np.abs(values) * max(1.0, abs(weight)) <= _LARGEST)
    failed = int(wrong.sum())
    if failed and failure is None:
        failure = (
            f"reward {name} is {values[wrong][0]:g} on one of {failed} failed completions; with "
            f"its weight of {weight:g} it must be within +-{_LARGEST:g}"
        )
    values = np.where(wrong, np.nan, values)
    return RewardScores(
        scores.total + weight * values if weight else scores.total,
        {**scores.components, name: values},
        {**scores.failures, name: failed},
        scores.first_failure or failure,
    )


def _apply(
    term: Reward, completions: Sequence[str], examples: Sequence[Mapping[str, Any]]
) -> Sequence[float | BaseException]:
    """Returns the reward of each completion, or its error."""
    own = [copy.deepcopy(dict(example)) for example in examples]
    if not is_batched(term.function):
        pairs = list(zip(completions, own, strict=True))
        return call_each(term.function, pairs, timeout=term.timeout, convert=_number)
    count = len(completions)
    convert = functools.partial(_each, count=count)
    whole = [(list(completions), own)]
    (returned,) = call_each(term.function, whole, timeout=term.timeout, convert=convert)
    return [returned] * count if isinstance(returned, BaseException) else returned


def _each(returned: Any, *, count: int) -> list[float | BaseException]:
    """Converts a batched function's result for `count` completions."""
    if isinstance(returned, (str, bytes, Mapping, Set)):  # whose items are no rewards in order
        raise ValueError(f"it returned {returned!r:.80}; return a list of {count} numbers")
    values = list(itertools.islice(returned, count + 1))
    if len(values) != count:
        many = f"more than {count}" if len(values) > count else len(values)
        raise ValueError(f"{many} rewards for {count} completions")
    return [_number_or_error(value) for value in values]


def _number_or_error(value: Any) -> float | BaseException:
    try:
        return _number(value)
    except Exception as error:
        return error


def _number(value: Any) -> float:
    """Raises ValueError for what is not finite, whatever the conversion raises for no number."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        remedy = "return a number"
        if isinstance(value, list | tuple):
            remedy += ", or mark a function of all completions with jaxrl.environments.batched"
        raise ValueError(f"it returned {value!r:.80}; {remedy}") from error
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}; return a finite number")
    return number
