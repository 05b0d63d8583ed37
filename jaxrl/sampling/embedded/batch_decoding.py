"""Decoding of one batch from prompts to completions, driven from the host."""

import threading
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
    row_experts,
    take_rows,
)
from jaxrl.sampling.embedded.draw_token import DrawSettings, draw_settings
from jaxrl.sampling.embedded.kv_cache import prefill
from jaxrl.sampling.embedded.stopping import empty_tail
from sharding.partition import Layout
from sharding.transfer import fetch, place

# A batch shrinks by this factor once so few of its rows are running, but never below this number of
# rows: a step with fewer takes hardly less time.
_SHRINK, _MIN_ROWS = 4, 8


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
        self._length, self._truncated = 0, False

    @property
    def context_length(self) -> int:
        """Tokens of the context."""
        return len(self._turn.context)

    def append(self, segment: Segment, *, row: int, length: int) -> bool:
        """Takes the tokens of a row of `length` tokens, at most up to the completion's maximum.

        Returns:
          Whether the maximum is reached.
        """
        most = self._turn.max_tokens
        self._truncated, length = length > most, min(length, most)
        new = slice(length - self._length)
        self._tokens.append(np.asarray(segment.tokens)[new, row])
        self._logprobs.append(np.asarray(segment.logprobs)[new, row])
        self._length = length
        return length == most

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
            finish_reason="stop" if stopped and not self._truncated else "length",
            experts=(
                None
                if experts is None
                else experts[: self.context_length + self._length - 1].copy()
            ),
        )


def max_rows(max_batch: int, *, shards: int) -> int:
    """Returns the rows of the largest batch: `max_batch`, rounded up to a multiple of `shards`."""
    return -(-max_batch // shards) * shards


def shrunk_rows(rows: int, *, shards: int) -> int:
    """Returns the number of rows that a batch shrinks to; 0 if it does not shrink."""
    fewer = rows // _SHRINK
    return fewer if fewer >= _MIN_ROWS and fewer % shards == 0 else 0


def cache_sizes(context: int, completion: int) -> list[int]:
    """Returns the successive sizes of a batch's cache, in slots.

    The first holds contexts of up to `context` tokens, the last `completion` more tokens.
    """
    width = length_bucket(context, step=16)
    # The last token drawn needs no slot.
    sizes, most = [width], length_bucket(width + completion - 1, step=TILE)
    while sizes[-1] < most or len(sizes) == 1:
        sizes.append(min(length_bucket(sizes[-1] + SEGMENT, step=TILE), most))
    return sizes


def decode_batch(turns: Sequence[Turn], request: DecodeRequest) -> Iterator[Completion]:
    """Decodes sequences together and yields completions as they finish.

    Completions that finish between two visits to the host come shortest first.

    Raises:
      FloatingPointError: if the model's logits are not finite.
      ClosedError: once the sampler is closed.
    """
    most = max(turn.max_tokens for turn in turns)
    width, slots, *larger = cache_sizes(max(len(turn.context) for turn in turns), most)
    sizes = iter(larger)
    settings = draw_settings(request.params)
    state, out = _prefill(turns, request, width=width, slots=slots, settings=settings)
    partial: list[PartialCompletion | None] = [PartialCompletion(turn) for turn in turns]
    partial += [None] * (state.token.shape[0] - len(turns))
    total = 0
    while True:
        if request.closed.is_set():
            raise ClosedError("the sampler was closed")
        out, length, ended = fetch((out, state.length, state.ended))
        total += int(out.count)
        finished = []
        for row, one in enumerate(partial):
            if one is None:
                continue
            if one.append(out, row=row, length=int(length[row])) or ended[row]:
                experts = state.cache.experts
                if experts is not None:
                    experts = fetch(row_experts(experts, np.int32(row)))
                finished.append(
                    one.finish(stopped=ended[row], version=request.version, experts=experts)
                )
                partial[row] = None
        yield from sorted(finished, key=lambda c: (len(c.tokens), c.prompt_index, c.sample_index))
        running = [row for row, one in enumerate(partial) if one is not None]
        if not running:
            return
        if full := width + total - 1 == slots:
            slots = next(sizes)
        size = shrunk_rows(len(partial), shards=request.shards)
        if len(running) <= size:
            source = np.array(running + [0] * (size - len(running)), np.int32)
            used = np.arange(size) < len(running)
            state = take_rows(state, request.put(source), request.put(used), slots=slots)
            partial = [partial[row] for row in running] + [None] * (size - len(running))
            size = shrunk_rows(size, shards=request.shards)
        elif full:
            state = grow_cache(state, slots=slots)
        state, out = decode_segment(
            request.weights,
            state,
            max_tokens=np.int32(most),
            floor=np.int32(size),
            settings=settings,
            model=request.model,
            precision=request.precision,
        )


def _prefill(
    turns: Sequence[Turn],
    request: DecodeRequest,
    *,
    width: int,
    slots: int,
    settings: DrawSettings,
) -> tuple[DecodeState, Segment]:
    """Runs every distinct context once and draws the first token of every completion."""
    shards = request.shards
    prompts = {turn.context.tobytes(): turn.context for turn in turns}
    shape = (count_bucket(len(prompts), multiple=shards), width)
    tokens, lengths = np.zeros(shape, np.int32), np.ones(shape[0], np.int32)
    for row, prompt in enumerate(prompts.values()):
        lengths[row] = len(prompt)
        tokens[row, : len(prompt)] = prompt
    row_of = {content: row for row, content in enumerate(prompts)}
    size = count_bucket(len(turns), multiple=shards)
    size = min(size, max_rows(request.max_batch, shards=shards))
    source, index = np.zeros(size, np.int32), np.zeros((size, 2), np.int32)
    source[: len(turns)] = [row_of[turn.context.tobytes()] for turn in turns]
    index[: len(turns)] = [(turn.prompt_index, turn.sample_index) for turn in turns]
    plan = RowPlan(source, index, np.arange(size) < len(turns), empty_tail(size, settings.stops))
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
