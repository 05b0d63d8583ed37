"""Decoding of batches from prompts to completions, driven from the host."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrl.core.precision import Precision
from jaxrl.models.attention import TILE
from jaxrl.models.decoder import Model
from jaxrl.models.spec import Params
from jaxrl.sampling.base import ClosedError, Completion, SamplingParams, Turn
from jaxrl.sampling.embedded.buckets import count_bucket, length_bucket
from jaxrl.sampling.embedded.decode_steps import (
    SEGMENT,
    DecodeState,
    RowPlan,
    Segment,
    decode_segment,
    draw_first,
    grow_cache,
    put_rows,
    row_experts,
    take_rows,
)
from jaxrl.sampling.embedded.draw_token import draw_settings
from jaxrl.sampling.embedded.kv_cache import prefill
from jaxrl.sampling.embedded.stopping import empty_tail
from sharding.partition import Layout
from sharding.transfer import fetch, place

# A batch shrinks by this factor once so few of its rows are running, but never below this number of
# rows: a step with fewer takes hardly less time.
_SHRINK, _MIN_ROWS = 4, 8

# While turns wait, they are put into a batch once one row in so many has ended.
_REFILL = 8


class DecodeRequest(NamedTuple):
    """Weights and settings that all batches of a request share."""

    weights: Params
    version: int
    params: SamplingParams
    model: Model
    precision: Precision
    layout: Layout | None
    max_batch: int
    closed: threading.Event
    record_experts: bool

    @property
    def shards(self) -> int:
        """Number of parts that a batch is divided into over the mesh."""
        if self.layout is None:
            return 1
        devices = self.layout.mesh.size
        return devices // self.layout.batch(("batch",)).shard_shape((devices,))[0]

    @property
    def key(self) -> jax.Array:
        """The key of all random numbers, key[]."""
        seed = self.params.seed
        return jax.random.fold_in(jax.random.key(seed % 2**32, impl="threefry2x32"), seed // 2**32)

    def put(self, rows: np.ndarray) -> jax.Array | np.ndarray:
        """Places an array [B, ...] with one row per prompt or completion on the devices."""
        return rows if self.layout is None else place(rows, self.layout.batch(("batch",)))


class PartialCompletion:
    """The tokens of one completion so far."""

    def __init__(self, turn: Turn):
        self._turn = turn
        self._tokens: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._length = 0

    @property
    def position(self) -> int:
        """Position of the last token, hence its slot."""
        return len(self._turn.context) + self._length - 1

    @property
    def full(self) -> bool:
        """True once it has as many tokens as its turn allows."""
        return self._length == self._turn.max_tokens

    def append(self, segment: Segment, *, row: int, length: int) -> None:
        """Takes the new tokens of a row that has `length` in all."""
        new = slice(length - self._length)
        self._tokens.append(np.asarray(segment.tokens)[new, row])
        self._logprobs.append(np.asarray(segment.logprobs)[new, row])
        self._length = length

    def finish(self, *, stopped: bool, version: int, experts: np.ndarray | None) -> Completion:
        """Returns the completion; `experts` are those of its row from the context's first token.

        Raises:
          FloatingPointError: if a log-prob is not finite.
        """
        prompt, sample = self._turn.prompt_index, self._turn.sample_index
        logprobs = np.concatenate(self._logprobs)
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(
                f"policy version {version} gives logits that are not finite at token "
                f"{np.argmin(np.isfinite(logprobs))} of completion {sample} of prompt {prompt}: "
                "the weights hold NaN or infinity, or the sampler's dtype overflows (f16 ends at "
                "65504; try precision.sampler=bf16)"
            )
        return Completion(
            prompt_index=prompt,
            sample_index=sample,
            tokens=np.concatenate(self._tokens),
            logprobs=logprobs,
            versions=np.full(len(logprobs), version, np.int32),
            finish_reason="stop" if stopped else "length",
            experts=None if experts is None else experts[: self.position].copy(),
        )


def max_rows(max_batch: int, *, shards: int) -> int:
    """Returns the rows of the largest batch: `max_batch`, rounded up to a multiple of `shards`."""
    return -(-max_batch // shards) * shards


def shrunk_rows(rows: int, *, shards: int) -> int:
    """Returns the number of rows that a batch shrinks to; 0 if it does not shrink."""
    fewer = rows // _SHRINK
    return fewer if fewer >= _MIN_ROWS and fewer % shards == 0 else 0


def refilled_rows(rows: int, *, longest: int, shards: int) -> int:
    """Returns the number of rows that waiting turns are put into together. It is 0 if no completion
    is longer than a segment: the batch ends before the programs for it are compiled."""
    return -(-max(1, rows // _REFILL) // shards) * shards if longest > SEGMENT else 0


def most_slots(context: int, completion: int) -> int:
    """Returns the slots of the largest cache for contexts of up to `context` tokens and up to
    `completion` more."""
    # The last token drawn needs no slot.
    return length_bucket(length_bucket(context, step=16) + completion - 1, step=TILE)


def larger_cache(slots: int, *, holds: int, most: int) -> int:
    """Returns the size that follows a cache of `slots` slots: the first with `holds` slots of the
    sizes up to `most`."""
    while True:
        slots = min(length_bucket(slots + SEGMENT, step=TILE), most)
        if slots >= min(holds, most):
            return slots


def cache_sizes(context: int, completion: int) -> list[int]:
    """Returns the successive sizes of a batch's cache, in slots.

    The first holds contexts of up to `context` tokens, the last `completion` more tokens.
    """
    sizes, most = [length_bucket(context, step=16)], most_slots(context, completion)
    while sizes[-1] < most or len(sizes) == 1:
        sizes.append(larger_cache(sizes[-1], holds=1, most=most))
    return sizes


def decode_turns(turns: Sequence[Turn], request: DecodeRequest) -> Iterator[Completion]:
    """Decodes sequences, as many together as the request allows, and yields completions as they
    finish.

    Completions that finish between two visits to the host come shortest first.

    Raises:
      FloatingPointError: if the model's logits are not finite.
      ClosedError: once the sampler is closed.
    """
    waiting = deque(turns)
    while waiting:
        yield from _decode_batch(waiting, request)


def _decode_batch(waiting: deque[Turn], request: DecodeRequest) -> Iterator[Completion]:
    """Decodes the first of the waiting turns and puts others into rows that have ended, until none
    runs."""
    longest = max(turn.max_tokens for turn in waiting)
    most = most_slots(max(len(turn.context) for turn in waiting), longest)
    state, out, partial = _first_rows(waiting, request, most=most)
    refilled = refilled_rows(len(partial), longest=longest, shards=request.shards)
    settings = draw_settings(request.params)
    while True:
        if request.closed.is_set():
            raise ClosedError("the sampler was closed")
        yield from _take_finished(partial, state, out, version=request.version)
        running = [row for row, one in enumerate(partial) if one is not None]
        if not running:
            return
        rows, slots, due = len(partial), state.cache.slots, min(refilled, len(waiting))
        if due and len(running) <= rows - due:
            state, out = _refill(state, partial, waiting, request, rows=refilled, most=most)
            continue
        if full := max(one.position for one in partial if one is not None) >= slots:
            slots = larger_cache(slots, holds=1, most=most)
        fewer = 0 if due else shrunk_rows(rows, shards=request.shards)
        if len(running) <= fewer:
            source = np.array(running + [0] * (fewer - len(running)), np.int32)
            used = np.arange(fewer) < len(running)
            state = take_rows(state, request.put(source), request.put(used), slots=slots)
            partial = [partial[row] for row in running] + [None] * (fewer - len(running))
            fewer = shrunk_rows(fewer, shards=request.shards)
        elif full:
            state = grow_cache(state, slots=slots)
        state, out = decode_segment(
            request.weights,
            state,
            floor=np.int32(rows - due if due else fewer),
            settings=settings,
            model=request.model,
            precision=request.precision,
        )


def _take_finished(
    partial: list[PartialCompletion | None], state: DecodeState, out: Segment, *, version: int
) -> list[Completion]:
    """Appends new tokens to the completions of a batch's rows and takes those that have ended."""
    out, length, stopped = fetch((out, state.length, state.stopped))
    finished = []
    for row, one in enumerate(partial):
        if one is None:
            continue
        one.append(out, row=row, length=int(length[row]))
        if one.full or stopped[row]:
            experts = state.cache.experts
            if experts is not None:
                experts = fetch(row_experts(experts, np.int32(row)))
            finished.append(one.finish(stopped=stopped[row], version=version, experts=experts))
            partial[row] = None
    return sorted(finished, key=lambda c: (len(c.tokens), c.prompt_index, c.sample_index))


def _first_rows(
    waiting: deque[Turn], request: DecodeRequest, *, most: int
) -> tuple[DecodeState, Segment, list[PartialCompletion | None]]:
    """Makes a batch of the first of the waiting turns."""
    shards = request.shards
    rows = count_bucket(len(waiting), multiple=shards)
    rows = min(rows, max_rows(request.max_batch, shards=shards))
    turns = _take_turns(waiting, rows)
    width = length_bucket(max(len(turn.context) for turn in turns), step=16)
    slots = larger_cache(width, holds=1, most=most)
    state, out = _prefill(turns, request, shape=(1, width), rows=rows, slots=slots)
    unused: list[PartialCompletion | None] = [None] * (rows - len(turns))
    return state, out, [*map(PartialCompletion, turns), *unused]


def _refill(
    state: DecodeState,
    partial: list[PartialCompletion | None],
    waiting: deque[Turn],
    request: DecodeRequest,
    *,
    rows: int,
    most: int,
) -> tuple[DecodeState, Segment]:
    """Puts up to `rows` waiting turns into rows that have ended.

    A prompt is computed once for the completions that begin together.
    """
    free = [row for row, one in enumerate(partial) if one is None][:rows]
    turns = _take_turns(waiting, len(free))
    # Coarser sizes than a first batch has: fewer programs, and little padding in so few rows.
    width = length_bucket(max(len(turn.context) for turn in turns), step=TILE)
    new, out = _prefill(turns, request, shape=(rows // 4, width), rows=rows, slots=width)
    if width > state.cache.slots:
        slots = larger_cache(state.cache.slots, holds=width, most=most)
        state = grow_cache(state, slots=slots)
    places = np.full(rows, len(partial), np.int32)
    places[: len(turns)] = free[: len(turns)]
    for row, turn in zip(free, turns, strict=False):
        partial[row] = PartialCompletion(turn)
    return put_rows(state, new, out, request.put(places))


def _take_turns(waiting: deque[Turn], count: int) -> list[Turn]:
    return [waiting.popleft() for _ in range(min(count, len(waiting)))]


def _prefill(
    turns: Sequence[Turn],
    request: DecodeRequest,
    *,
    shape: tuple[int, int],
    rows: int,
    slots: int,
) -> tuple[DecodeState, Segment]:
    """Runs every distinct context once and draws the first token of every completion.

    Args:
      turns: at most `rows`.
      request: weights and settings.
      shape: the fewest prompts to compile for, and their length.
      rows: of the batch.
      slots: of its cache.
    """
    shards, settings = request.shards, draw_settings(request.params)
    prompts = {turn.context.tobytes(): turn.context for turn in turns}
    count = count_bucket(max(len(prompts), shape[0]), multiple=shards)
    tokens, lengths = np.zeros((count, shape[1]), np.int32), np.ones(count, np.int32)
    for row, prompt in enumerate(prompts.values()):
        lengths[row] = len(prompt)
        tokens[row, : len(prompt)] = prompt
    row_of = {content: row for row, content in enumerate(prompts)}
    source, limit = np.zeros((2, rows), np.int32)
    index = np.zeros((rows, 2), np.int32)
    source[: len(turns)] = [row_of[turn.context.tobytes()] for turn in turns]
    limit[: len(turns)] = [turn.max_tokens for turn in turns]
    index[: len(turns)] = [(turn.prompt_index, turn.sample_index) for turn in turns]
    plan = RowPlan(source, index, limit, empty_tail(rows, settings.stops))
    cache, logits = prefill(
        request.weights,
        request.put(tokens),
        request.put(lengths),
        model=request.model,
        precision=request.precision,
        record_experts=request.record_experts,
    )
    plan, key = jax.tree.map(request.put, plan), request.key
    return draw_first(cache, logits, lengths, plan=plan, key=key, settings=settings, slots=slots)
