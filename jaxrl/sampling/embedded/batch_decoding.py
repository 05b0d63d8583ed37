"""Decoding of batches from prompts to completions, driven from the host."""

import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxrl.core.buckets import count_bucket, length_bucket
from jaxrl.models.attention.blocks import TILE
from jaxrl.sampling.base import ClosedError, Completion, Turn
from jaxrl.sampling.embedded.decode_steps import (
    SEGMENT,
    decode_segment,
    grow_cache,
    put_rows,
    row_experts,
    set_own,
    take_rows,
)
from jaxrl.sampling.embedded.first_tokens import start_batch
from jaxrl.sampling.embedded.request import DecodeRequest, PartialCompletion
from jaxrl.sampling.embedded.turn_caches import EndedRows, Queued, by_array, take_prefix
from jaxrl.sharding.transfer import fetch

# A batch shrinks by this factor once only that fraction of its rows is running, but never below
# this number of rows: a step with fewer takes hardly less time.
_SHRINK, _MIN_ROWS = 4, 8

# The caches that a request keeps for the next turns have up to this many times the rows of its
# largest batch. A batch that shrinks leaves at most 4/3 of its rows.
KEPT = 2

# Waiting turns are put into a batch once one row in this many has ended.
_REFILL = 8


def max_rows(max_batch: int, *, shards: int) -> int:
    """Returns the rows of the largest batch: `max_batch`, rounded up to a multiple of `shards`."""
    return -(-max_batch // shards) * shards


def shrunk_rows(rows: int, *, shards: int) -> int:
    """Returns the number of rows that a batch shrinks to; 0 if it does not shrink."""
    fewer = rows // _SHRINK
    return fewer if fewer >= _MIN_ROWS and fewer % shards == 0 else 0


def most_slots(context: int, completion: int) -> int:
    """Returns the slots of the largest cache for contexts and completions up to these lengths."""
    # The last token drawn needs no slot.
    return length_bucket(length_bucket(context, step=16) + completion - 1, step=TILE)


def larger_cache(slots: int, *, holds: int, most: int) -> int:
    """Returns the next size after `slots` that has at least `holds` slots; at most `most`."""
    while True:
        slots = min(length_bucket(slots + SEGMENT, step=TILE), most)
        if slots >= min(holds, most):
            return slots


def cache_sizes(context: int, completion: int) -> list[int]:
    """Returns the successive sizes of a batch's cache in slots: the first holds contexts of up to
    `context` tokens, the last `completion` more."""
    sizes, most = [length_bucket(context, step=16)], most_slots(context, completion)
    while sizes[-1] < most or len(sizes) == 1:
        sizes.append(larger_cache(sizes[-1], holds=1, most=most))
    return sizes


def decode_turns(turns: Sequence[Turn], request: DecodeRequest) -> Iterator[Completion]:
    """Decodes sequences, as many together as the request allows, and yields completions as they
    finish; those of one segment come shortest first.

    Raises:
      FloatingPointError: if the model's logits are not finite.
      ClosedError: once the sampler is closed.
    """
    queued = [Queued(turn, take_prefix(turn, request.weights)) for turn in turns]
    known = deque(by_array(queued))
    new = deque(one for one in queued if one.prefix is None)
    del queued  # kept arrays are freed once the last turn that begins with them has a row
    # The states of linear layers include the tokens drawn after the end: their rows are not kept.
    linear = request.model.config.linear is not None
    largest = max_rows(request.max_batch, shards=request.shards)
    ended = EndedRows(request.weights, rows=0 if linear else KEPT * largest)
    for waiting in (known, new):
        while waiting:
            batch = Batch(waiting, request, ended)
            while batch.running:
                yield from batch.take_finished()
                batch.advance()
            del batch  # its cache is freed before the next one is made


class Batch:
    """Rows of completions in progress; waiting turns take the rows of ended completions."""

    def __init__(self, waiting: deque[Queued], request: DecodeRequest, ended: EndedRows) -> None:
        """Starts with the first waiting turns."""
        self._waiting, self._request, self._ended, self._most = waiting, request, ended, 0
        self._fit_waiting()
        rows = self._rows(len(waiting))
        # Without a completion longer than a segment no rows are refilled: the batch would end
        # before the programs for it are compiled.
        longest = max(turn.max_tokens for turn, _ in waiting)
        self._refilled = self._rows_to_refill(rows) if longest > SEGMENT else 0
        queued = _take(waiting, rows)
        width = length_bucket(max(len(turn.context) for turn, _ in queued), step=16)
        slots = larger_cache(width, holds=1, most=self._most)
        self._state, self._out = start_batch(
            queued, request, shape=(1, width), rows=rows, slots=slots
        )
        self._partial: list[PartialCompletion | None] = [None] * rows
        self._partial[: len(queued)] = [PartialCompletion(turn) for turn, _ in queued]

    @property
    def running(self) -> bool:
        """False once all rows have ended."""
        return any(one is not None for one in self._partial)

    def join(self, request: DecodeRequest) -> None:
        """Goes on with a request of more turns with settings of their own, which wait: makes room
        for them, and reads the settings of all rows again."""
        self._request = request
        self._fit_waiting()
        running = self._running()
        rows = self._rows(len(running) + len(self._waiting))
        if rows > len(self._partial):
            self._move(running, rows=rows, slots=self._state.cache.slots)
        self._refilled = self._rows_to_refill(len(self._partial))
        assert request.own is not None
        places = [None if one is None else one.turn.prompt_index for one in self._partial]
        own = jax.tree.map(request.put, request.own.rows(places, size=len(places)))
        stops = request.settings.stops
        self._state = dataclasses.replace(self._state, rows=set_own(self._state.rows, own, stops))

    def advance(self, most: int = SEGMENT) -> None:
        """Draws at most this many tokens in each row, or puts waiting turns into ended rows."""
        request, running = self._request, self._running()
        if not running:
            return
        rows, slots = len(self._partial), self._state.cache.slots
        due = min(self._refilled, len(self._waiting))
        if due and len(running) <= rows - due:
            return self._refill()
        if full := max(one.position for one in self._partial if one is not None) >= slots:
            slots = larger_cache(slots, holds=1, most=self._most)
        fewer = 0 if due else shrunk_rows(rows, shards=request.shards)
        if len(running) <= fewer:
            self._ended.keep(self._state.cache)
            self._move(running, rows=fewer, slots=slots)
            fewer = shrunk_rows(fewer, shards=request.shards)
        elif full:
            self._state = grow_cache(self._state, slots=slots)
        self._state, self._out = decode_segment(
            request.weights,
            self._state,
            most=np.int32(most),
            floor=np.int32(rows - due if due else fewer),
            settings=request.settings,
            model=request.model,
            precision=request.precision,
        )

    def _running(self) -> list[int]:
        return [row for row, one in enumerate(self._partial) if one is not None]

    def _rows(self, count: int) -> int:
        """Returns the rows of a batch of so many completions."""
        shards = self._request.shards
        most = max_rows(self._request.max_batch, shards=shards)
        return min(count_bucket(count, multiple=shards), most)

    def _rows_to_refill(self, rows: int) -> int:
        """Returns the number of rows that waiting turns are put into together."""
        return max_rows(max(1, rows // _REFILL), shards=self._request.shards)

    def _fit_waiting(self) -> None:
        """Lets the cache grow as far as the waiting turns need."""
        turns = [turn for turn, _ in self._waiting]
        longest, context = max(t.max_tokens for t in turns), max(len(t.context) for t in turns)
        self._most = max(self._most, most_slots(context, longest))

    def _move(self, running: list[int], *, rows: int, slots: int) -> None:
        """Moves the running rows to the front of a batch of another size."""
        source = np.array(running + [0] * (rows - len(running)), np.int32)
        used = np.arange(rows) < len(running)
        put = self._request.put
        self._state = take_rows(self._state, put(source), put(used), slots=slots)
        self._partial = [self._partial[row] for row in running]
        self._partial += [None] * (rows - len(running))

    def take_finished(self) -> list[Completion]:
        """Appends new tokens to the rows' completions; removes and returns the ended ones.

        Raises:
          FloatingPointError: if the model's logits are not finite.
          ClosedError: once the sampler is closed.
        """
        if self._request.closed.is_set():
            raise ClosedError("the sampler was closed")
        state = self._state
        out, length, stopped = fetch((self._out, state.rows.length, state.rows.stopped))
        finished = []
        for row, one in enumerate(self._partial):
            if one is None:
                continue
            one.append(out, row=row, length=int(length[row]))
            if one.full or stopped[row]:
                experts = state.cache.experts
                if experts is not None:
                    experts = fetch(row_experts(experts, np.int32(row)))
                version = self._request.version
                done = one.finish(stopped=stopped[row], version=version, experts=experts)
                self._ended.add(row, one.turn, done.tokens)
                finished.append(done)
                self._partial[row] = None
        if not self.running:
            # Before the completions are used: the episodes may then request their next turns.
            self._ended.keep(self._state.cache)
        return sorted(finished, key=lambda c: (len(c.tokens), c.prompt_index, c.sample_index))

    def _refill(self) -> None:
        """Puts waiting turns into rows that have ended; equal contexts are computed once."""
        rows = self._refilled
        free = [row for row, one in enumerate(self._partial) if one is None][:rows]
        queued = _take(self._waiting, len(free))
        free = free[: len(queued)]
        self._ended.drop(free)
        # Coarser sizes than a first batch has: fewer programs, and little padding in so few rows.
        width = length_bucket(max(len(turn.context) for turn, _ in queued), step=TILE)
        shape = (rows // 4, width)
        new, out = start_batch(queued, self._request, shape=shape, rows=rows, slots=width)
        if width > self._state.cache.slots:
            slots = larger_cache(self._state.cache.slots, holds=width, most=self._most)
            self._state = grow_cache(self._state, slots=slots)
        places = np.full(rows, len(self._partial), np.int32)
        places[: len(free)] = free
        for row, (turn, _) in zip(free, queued, strict=True):
            self._partial[row] = PartialCompletion(turn)
        self._state, self._out = put_rows(self._state, new, out, self._request.put(places))


def _take(waiting: deque[Queued], count: int) -> list[Queued]:
    return [waiting.popleft() for _ in range(min(count, len(waiting)))]
