"""The embedded sampler on its own devices, shared by several threads."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxrl.sampling.base import Completion, Sampler, SamplingParams, Turn


class OneAtATime(Sampler):
    """A sampler that other threads use while the learner trains on other devices.

    Requests run one after another: programs that two threads start on the same devices in different
    orders would deadlock. A request's arrays go to the sampler's own device: on the learner's they
    would wait for its step.
    """

    def __init__(self, sampler: Sampler, device: Any) -> None:
        """Wraps a sampler whose first `jax.Device` is `device`."""
        self._sampler, self._device, self._busy = sampler, device, threading.Lock()
        self.records_kept = sampler.records_kept

    @property
    def version(self) -> int:
        """See `Sampler.version`."""
        return self._sampler.version

    def sample_turns(self, turns: Sequence[Turn], params: SamplingParams) -> Iterator[Completion]:
        """See `Sampler.sample_turns`."""
        return self._in_turn(self._sampler.sample_turns(turns, params))

    def _in_turn(self, completions: Iterator[Completion]) -> Iterator[Completion]:
        with self._busy:
            while True:
                with jax.default_device(self._device):  # a setting of the thread: not over `yield`
                    one = next(completions, None)
                if one is None:
                    return
                yield one

    def close(self) -> None:
        """See `Sampler.close`."""
        self._sampler.close()
