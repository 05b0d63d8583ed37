"""Groups of rollouts that the workers of a fleet play: the learner's side."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from typing import Any, NamedTuple

import numpy as np

from jaxrl.core import Episode, Rollout
from jaxrl.data import Example
from jaxrl.fleet.workers import Died, Workers
from jaxrl.sampling import SamplingParams, VllmSampler


class Group(NamedTuple):
    """A group to be played."""

    number: int  # of its prompt in the run
    example: Example
    index: int  # of the prompt in its request; random numbers depend on it
    params: SamplingParams  # without stop texts, which a worker has
    size: int  # rollouts
    scored: bool  # reward functions are called, too


class Servers(NamedTuple):
    """The servers to sample from."""

    number: int  # of the change, since the process started
    used: Mapping[str, Any]  # arguments of `VllmSampler.use_version`
    requests: int  # of a worker at the same time, to each server


class Played(NamedTuple):
    """A group that was played."""

    rollouts: Sequence[Rollout]
    notes: Sequence[str]  # failures of rewards or of the environment


Play = Callable[[bytes, Servers, Group], Played]
"""(setup of the player, ...) -> the group; runs in a worker."""


class GroupWorkers:
    """Has groups played by workers.

    Group, index, params and weights determine a group, so one that is played again, elsewhere, is
    the same where the servers' numerics do not depend on their load.
    """

    def __init__(
        self,
        workers: Workers,
        play: Play,
        *,
        setup: bytes,
        sampler: VllmSampler,
        weights: Mapping[str, float],
        max_requests: int,
    ) -> None:
        """`sampler` knows the servers and their present weights; `weights` are those of the reward.
        All workers together keep `max_requests` requests at each server."""
        self._workers, self._play, self._setup = workers, play, setup
        self._sampler, self._weights = sampler, weights
        self._servers, self._max_requests = Servers(0, {}, 0), max_requests

    def submit(
        self,
        number: int,
        example: Example,
        *,
        index: int,
        params: SamplingParams,
        size: int,
        scored: bool,
    ) -> "Future[Any]":
        """Has a group played; returns the future for `played`, which raises what the sampler raises
        in the worker."""
        changes, *known = self._servers
        present = (self._sampler.used, math.ceil(self._max_requests / self._workers.count))
        if present != tuple(known):
            self._workers.together = self._max_requests * len(self._sampler.used["urls"])
            self._servers = Servers(changes + 1, *present)
        plain = dataclasses.replace(params, stop_texts=None)
        group = Group(number, example, index, plain, size, scored)
        return self._workers.submit(self._play, self._setup, self._servers, group)

    def played(self, result: Any, *, number: int, example: Example, size: int) -> Played:
        """Returns the group of a future's result. If workers died of it, all of its rollouts have
        failed and are not trained on."""
        if not isinstance(result, Died):
            return result
        failed = Rollout(
            prompt=example.tokens,
            completion=np.zeros(0, np.int32),
            logprobs=np.zeros(0, np.float32),
            action_mask=np.zeros(0, bool),
            version=np.zeros(0, np.int32),
            group=number,
            components=(math.nan,) * len(self._weights),
            episode=Episode((), "error", {}),
        )
        return Played([failed] * size, [f"prompt {number}: {result.text} while they played it"])

    def play(
        self, examples: Mapping[int, Example], *, params: SamplingParams, size: int, scored: bool
    ) -> Iterator[Played]:
        """Yields the groups of some prompts as they finish."""
        futures = {
            self.submit(number, example, index=i, params=params, size=size, scored=scored): number
            for i, (number, example) in enumerate(examples.items())
        }
        try:
            for future in as_completed(futures):
                number = futures[future]
                yield self.played(
                    future.result(), number=number, example=examples[number], size=size
                )
        finally:
            for future in futures:
                future.cancel()
