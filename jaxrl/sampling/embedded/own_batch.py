"""Turns with settings and adapters of their own, which join a batch while it is decoded."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl.core.buckets import count_bucket
from jaxrl.models.spec import Params
from jaxrl.sampling.base import Completion, OwnTurn, Turn
from jaxrl.sampling.embedded.batch_decoding import Batch
from jaxrl.sampling.embedded.decode_steps import SEGMENT
from jaxrl.sampling.embedded.own_turns import OwnTurns
from jaxrl.sampling.embedded.request import DecodeRequest
from jaxrl.sampling.embedded.turn_caches import EndedRows, Queued


class OwnBatch:
    """Turns in progress with settings and adapters of their own, decoded by one program.

    A completion is the same, up to rounding, whatever the others of the batch are and whenever they
    join; with fixed sums and without adapters bit for bit. Turn caches are not used.
    """

    def __init__(
        self,
        *,
        check: Callable[[Sequence[Turn]], list[Turn]],
        request: Callable[..., Any],
        parts: int,
    ) -> None:
        """Makes one without turns; `EmbeddedSampler.open_own` does.

        Args:
          check: checks turns and sorts them.
          request: makes the request to the sampler from the settings of turns and the adapters
            that they name.
          parts: number of devices that rows are divided over.
        """
        self._check, self._make, self._parts = check, request, parts
        self._waiting, self._turns = deque[Queued](), dict[int, OwnTurn]()
        self._batch: Batch | None = None
        self._own: OwnTurns | None = None
        self._request: DecodeRequest | None = None
        self._added = 0

    def add(self, turns: Sequence[OwnTurn], adapters: Sequence[Params] = ()) -> int:
        """Adds turns to those in progress.

        Args:
          turns: see `OwnTurn`; `params.max_tokens` is ignored.
          adapters: those that turns name, these and the ones in progress, beside the weights that
            are served; from `lora.scaled`. Each multiplies as many rows as the one with the most
            turns, rounded up to a power of two.

        Returns:
          The number of the first turn; the others have the next ones.

        Raises:
          ValueError: as `Sampler.sample_turns`; no turn is added then.
        """
        first = self._added
        numbered = [
            one.turn._replace(prompt_index=number, cache=None)
            for number, one in enumerate(turns, first)
        ]
        numbered = self._check(numbered)
        together = self._turns | dict(enumerate(turns, first))
        count = count_bucket(len(adapters)) if adapters else 0
        own = OwnTurns(together, adapters=count, parts=self._parts, before=self._own)
        self._request, self._own = self._make(own, adapters), own
        self._turns, self._added = together, first + len(turns)
        self._waiting.extend(Queued(turn, None) for turn in numbered)
        if self._batch is not None:
            self._batch.join(self._request)
        return first

    def advance(self, most: int = SEGMENT) -> list[tuple[int, Completion]]:
        """Begins turns that wait, or draws tokens for those that have begun: at most this many for
        each, and at most 64.

        Returns:
          (number of a turn, its completion), of those that have ended.

        Raises:
          FloatingPointError: if the model's logits are not finite.
          ClosedError: once the sampler is closed.
        """
        if self._batch is not None:
            self._batch.advance(most)
        elif self._waiting:
            assert self._request is not None
            kept = EndedRows(self._request.weights, rows=0)
            self._batch = Batch(self._waiting, self._request, kept)
        else:
            return []
        ended = self._batch.take_finished()
        if not self._batch.running:
            self._batch = None
        found = []
        for one in ended:
            number = one.prompt_index
            index = self._turns.pop(number).turn.prompt_index
            found.append((number, one._replace(prompt_index=index)))
        if not self._turns:
            self._own = self._request = None
        return found
