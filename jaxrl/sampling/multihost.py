"""Samplers of multi-process runs: all processes sample together, or process 0 asks servers."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxrl.core.hosts import Hosts
from jaxrl.sampling.base import Completion, Sampler, SamplingParams, Turn


class MultihostSampler:
    """A sampler that computes on the devices of all processes: what process 0 asks for while it
    leads (`Hosts.on_leader`), all draw."""

    def __init__(self, sampler: Sampler, hosts: Hosts) -> None:
        def draw(
            prompts: Sequence[np.ndarray], params: SamplingParams, *, group_size: int
        ) -> list[Completion]:
            # Exhaust it: programs that process 0 starts in between would not reach the others.
            return list(sampler.sample(prompts, params, group_size=group_size))

        def draw_turns(turns: Sequence[Turn], params: SamplingParams) -> list[Completion]:
            return list(sampler.sample_turns(turns, params))

        self._sampler = sampler
        self._draw, self._draw_turns = hosts.on_all(draw), hosts.on_all(draw_turns)

    @property
    def version(self) -> int:
        """See `Sampler.version`."""
        return self._sampler.version

    def sample(
        self, prompts: Sequence[np.ndarray], params: SamplingParams, *, group_size: int
    ) -> Iterator[Completion]:
        """See `Sampler.sample`; yields after the last completion has finished."""
        return iter(self._draw(list(prompts), params, group_size=group_size))

    def sample_turns(self, turns: Sequence[Turn], params: SamplingParams) -> Iterator[Completion]:
        """See `Sampler.sample_turns`; yields after the last completion has finished."""
        return iter(self._draw_turns(list(turns), params))

    def close(self) -> None:
        """See `Sampler.close`."""
        self._sampler.close()


class NullSampler:
    """The sampler of processes other than 0, which alone talks to the servers."""

    version = 0

    def sample(
        self, prompts: Sequence[np.ndarray], params: SamplingParams, *, group_size: int
    ) -> Iterator[Completion]:
        """Raises RuntimeError: process 0 samples."""
        raise RuntimeError("process 0 samples, in Hosts.on_leader; this is another one")

    def sample_turns(self, turns: Sequence[Turn], params: SamplingParams) -> Iterator[Completion]:
        """Raises RuntimeError: likewise."""
        raise RuntimeError("process 0 samples, in Hosts.on_leader; this is another one")

    def close(self) -> None:
        """See `Sampler.close`."""
