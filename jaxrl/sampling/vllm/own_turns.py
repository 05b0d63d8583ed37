"""Turns with settings and adapters of their own, at vLLM servers."""

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from jaxrl.sampling.base import Completion, OwnTurn, check_turns
from jaxrl.sampling.vllm.sampler import HttpRequest, VllmSampler


class VllmOwnSampler(VllmSampler):
    """A `VllmSampler` that samples turns with settings and adapters of their own."""

    def submit(
        self, turns: Sequence[OwnTurn], adapters: Sequence[str] = ()
    ) -> list[Future[list[tuple[int, Completion]]]]:
        """Samples turns at the same time; consecutive samples of a context are one request.

        Args:
          turns: see `OwnTurn`.
          adapters: names under which the servers have loaded those that turns name.

        Returns:
          One for each request: (place of a turn, its completion), or the error of `sample_turns`.

        Raises:
          ValueError: as `sample_turns`.
        """
        numbered = [one.turn._replace(prompt_index=i, cache=None) for i, one in enumerate(turns)]
        numbered = check_turns(
            numbered, max_positions=self._max_positions, vocab_size=self._vocab_size
        )
        groups: list[list[int]] = []
        for place in range(len(turns)):
            if groups and _follows(turns[place], turns[groups[-1][-1]]):
                groups[-1].append(place)
            else:
                groups.append([place])

        def complete(request: HttpRequest) -> list[tuple[int, Completion]]:
            return [
                (place, one._replace(prompt_index=turns[place].turn.prompt_index))
                for one in self._complete(request)
                for place in [one.prompt_index]
            ]

        requests = []
        for places in groups:
            first = turns[places[0]]
            served, index = self._served, first.adapters
            if index is not None:
                served = served._replace(adapter=adapters[index])
            seed = np.random.SeedSequence([first.params.seed, first.turn.prompt_index])
            number = int(seed.generate_state(1, np.uint64)[0] >> 2)
            group = [numbered[place] for place in places]
            requests.append(HttpRequest(group, number, served, first.params))
        return [self._pools[-1].submit(complete, one) for one in requests]


def _follows(own: OwnTurn, before: OwnTurn) -> bool:
    """Returns True if a turn is the next sample of the same context."""
    turn, last = own.turn, before.turn
    return (
        own.params.temperature > 0  # vLLM refuses several greedy completions in one request
        and own.params == before.params
        and own.adapters == before.adapters
        and (turn.prompt_index, turn.sample_index) == (last.prompt_index, last.sample_index + 1)
        and turn.max_tokens == last.max_tokens
        and np.array_equal(turn.context, last.context)
    )
