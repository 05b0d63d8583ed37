"""Samplers of multi-process runs: all processes sample together, or process 0 queries servers."""

from collections.abc import Iterator, Sequence

from jaxrl.core.hosts import Hosts
from jaxrl.sampling.base import Completion, Sampler, SamplingParams, Turn


class MultihostSampler(Sampler):
    """A sampler on the devices of all processes, which all run the requests that process 0 makes
    within `Hosts.on_leader`."""

    def __init__(self, sampler: Sampler, hosts: Hosts) -> None:
        def sample_turns(turns: Sequence[Turn], params: SamplingParams) -> list[Completion]:
            # Exhaust it: programs that process 0 starts in between would not reach the others.
            return list(sampler.sample_turns(turns, params))

        self._sampler, self._sample_turns = sampler, hosts.on_all(sample_turns)
        self.records_kept = sampler.records_kept

    @property
    def version(self) -> int:
        """See `Sampler.version`."""
        return self._sampler.version

    def sample_turns(self, turns: Sequence[Turn], params: SamplingParams) -> Iterator[Completion]:
        """See `Sampler.sample_turns`; yields after the last completion has finished."""
        # Turns are sent to all processes; a cache cannot be.
        return iter(self._sample_turns([turn._replace(cache=None) for turn in turns], params))

    def close(self) -> None:
        """See `Sampler.close`."""
        self._sampler.close()


class NullSampler(Sampler):
    """The sampler of processes other than 0, which alone talks to the servers."""

    @property
    def version(self) -> int:
        """0: this process serves no weights."""
        return 0

    def sample_turns(self, turns: Sequence[Turn], params: SamplingParams) -> Iterator[Completion]:
        """Raises RuntimeError: only process 0 samples."""
        raise RuntimeError("only process 0 samples; call the sampler within Hosts.on_leader")

    def close(self) -> None:
        """Does nothing: this process samples nothing."""
