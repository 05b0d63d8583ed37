"""A worker of a fleet: a process that computes rewards, as an actor of Ray."""

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl.environments import Reward, load_rewards, use_processors


class Loaded(NamedTuple):
    """A reward that workers have loaded."""

    name: str
    weight: float
    takes_all: bool


class Spec(NamedTuple):
    """The reward functions of a key of a config."""

    paths: tuple[str, ...]
    weights: tuple[float, ...]
    timeout: float  # seconds per call
    key: str

    def load(self) -> list[Reward]:
        """Loads the functions; raises as `load_rewards`."""
        return load_rewards(self.paths, self.weights, timeout=self.timeout, key=self.key)


class Worker:
    """Loads the user's functions when they are first asked for, and calls them."""

    def __init__(self, directory: str, path: Sequence[str], *, processors: int) -> None:
        """Enters the run's working directory and takes the learner's module search path."""
        os.chdir(directory)
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
        use_processors(processors)

    def awake(self) -> bool:
        """Answers, which shows that the worker is there."""
        return True

    def load(self, spec: Spec) -> list[Loaded] | str:
        """Loads rewards; returns what the learner knows about them, or the text of an error."""
        try:
            terms = _terms(Spec(*spec))
        except ValueError as error:
            return str(error)
        return [Loaded(term.name, term.weight, term.takes_all) for term in terms]

    def apply(
        self,
        spec: Spec,
        index: int,
        completions: Sequence[str],
        examples: Sequence[Mapping[str, Any]],
    ) -> list[float | str]:
        """Applies the reward function at a place of the spec; returns as `Reward.apply`."""
        return _terms(Spec(*spec))[index].apply(completions, examples)


@functools.cache
def _terms(spec: Spec) -> list[Reward]:
    return spec.load()
