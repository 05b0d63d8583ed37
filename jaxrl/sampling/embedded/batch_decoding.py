"""One batch of answers from its prompts to its completions, seen from the host."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.core.precision import Precision
from jaxrl.models.decoder import Model
from jaxrl.models.spec import Params
from jaxrl.sampling.base import ClosedError, Completion, SamplingParams, Turn
from jaxrl.sampling.embedded.buckets import count_bucket, length_bucket
from jaxrl.sampling.embedded.decode_steps import (
    SEGMENT,
    Drawn,
    Rows,
    begin,
    decode,
    grow,
    move,
    sent,
    start,
)
from jaxrl.sampling.embedded.draw_token import Draw, draw
from jaxrl.sampling.embedded.stopping import empty_tail, stop_table
from sharding.partition import Layout
from sharding.transfer import fetch, place

# A batch becomes this many times smaller once so few of it are running, but not below this number
# of rows, where a step takes hardly less time.
_SHRINK, _FEWEST_ROWS = 4, 8


class Request(NamedTuple):
    """What all batches of a request share."""

    weights: Params
    version: int
    params: SamplingParams
    model: Model
    precision: Precision
    layout: Layout | None
    max_batch: int
    closed: threading.Event
    record: bool  # where the layers send tokens

    @property
    def shards(self) -> int:
        """How many parts a batch is cut into."""
        if self.layout is None:
            return 1
        devices = self.layout.mesh.size
        return devices // self.layout.batch(("batch",)).shard_shape((devices,))[0]

    def put(self, rows: np.ndarray) -> jax.Array | np.ndarray:
        """An array [N, ...] of prompts or answers, on the devices."""
        return rows if self.layout is None else place(rows, self.layout.batch(("batch",)))


class _Progress:
    """An answer while it is drawn."""

    def __init__(self, turn: Turn):
        self._turn = turn
        self._tokens: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._length, self.cut = 0, False

    @property
    def given(self) -> int:
        """Tokens of the context."""
        return len(self._turn.context)

    def extend(self, drawn: Drawn, *, row: int, length: int) -> bool:
        """Takes what was drawn for a row, which is now `length` tokens long or longer than the
        answer may be; whether it has reached that."""
        most = self._turn.max_tokens
        self.cut, length = length > most, min(length, most)
        new = slice(length - self._length)
        self._tokens.append(np.asarray(drawn.tokens)[new, row])
        self._logprobs.append(np.asarray(drawn.logprobs)[new, row])
        self._length = length
        return length == most

    def completion(self, *, stopped: bool, version: int, experts: np.ndarray | None) -> Completion:
        """The finished answer; `experts` are those of its row, from the first token of the context.

        Raises:
          FloatingPointError: if a log-prob is not finite.
        """
        prompt, sample = self._turn.prompt_index, self._turn.sample_index
        logprobs = np.concatenate(self._logprobs)
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(
                f"the logits of policy version {version} are not finite at token "
                f"{np.argmin(np.isfinite(logprobs))} of answer {sample} to prompt {prompt}: the "
                "weights hold NaN or infinity, or the sampler's dtype overflows (f16 ends at "
                "65504; try precision.sampler=bf16)"
            )
        return Completion(
            prompt_index=prompt,
            sample_index=sample,
            tokens=np.concatenate(self._tokens),
            logprobs=logprobs,
            versions=np.full(len(logprobs), version, np.int32),
            finish_reason="stop" if stopped and not self.cut else "length",
            experts=None if experts is None else experts[: self.given + self._length - 1].copy(),
        )


def most_rows(max_batch: int, *, shards: int) -> int:
    """Rows of the largest batch, a part of which is on each of `shards`."""
    return -(-max_batch // shards) * shards


def fewer_rows(rows: int, *, shards: int) -> int:
    """The number of rows that a batch shrinks to, 0 if it does not."""
    fewer = rows // _SHRINK
    return fewer if fewer >= _FEWEST_ROWS and fewer % shards == 0 else 0


def cache_sizes(context: int, answer: int) -> list[int]:
    """Slots of a batch's cache, one size after the other: first that of its contexts, of up to
    `context` tokens, and at last room for `answer` tokens more."""
    width = length_bucket(context, step=16)
    # The last token drawn needs no slot.
    sizes, most = [width], length_bucket(width + answer - 1, step=16)
    while sizes[-1] < most or len(sizes) == 1:
        sizes.append(min(length_bucket(sizes[-1] + SEGMENT, step=SEGMENT), most))
    return sizes


def run_batch(turns: Sequence[Turn], request: Request) -> Iterator[Completion]:
    """Draws answers together and yields them as they finish; of those that finish between two
    visits to the host the shortest first.

    Raises:
      FloatingPointError: if the model's logits are not finite.
      ClosedError: once the sampler is closed.
    """
    params = request.params
    most = max(turn.max_tokens for turn in turns)
    width, slots, *larger = cache_sizes(max(len(turn.context) for turn in turns), most)
    sizes = iter(larger)
    table, settings = stop_table(params.stop), draw(params)
    progress: list[_Progress | None] = [_Progress(turn) for turn in turns]
    total = 0
    rows, out = _begin(turns, request, width=width, slots=slots, table=table, settings=settings)
    progress += [None] * (rows.token.shape[0] - len(progress))
    while True:
        if request.closed.is_set():
            raise ClosedError("the sampler was closed")
        out, length, ended = fetch((out, rows.length, rows.ended))
        total += int(out.count)
        finished = []
        for row, one in enumerate(progress):
            if one is None:
                continue
            if one.extend(out, row=row, length=int(length[row])) or ended[row]:
                experts = None
                if rows.cache.experts is not None:
                    experts = fetch(sent(rows.cache.experts, np.int32(row)))[width - one.given :]
                done = one.completion(stopped=ended[row], version=request.version, experts=experts)
                finished.append(done)
                progress[row] = None
        yield from sorted(finished, key=lambda c: (len(c.tokens), c.prompt_index, c.sample_index))
        running = [row for row, one in enumerate(progress) if one is not None]
        if not running:
            return
        source, full = list(range(len(progress))), width + total - 1 == slots
        if len(running) <= fewer_rows(len(progress), shards=request.shards):
            source = running
        if full or len(source) < len(progress):
            slots = next(sizes) if full else slots
            rows, progress = _move(rows, progress, source, request, slots=slots)
        rows, out = decode(
            request.weights,
            rows,
            max_tokens=np.int32(most),
            floor=np.int32(fewer_rows(len(progress), shards=request.shards)),
            table=table,
            settings=settings,
            model=request.model,
            precision=request.precision,
        )


def _begin(
    turns: Sequence[Turn],
    request: Request,
    *,
    width: int,
    slots: int,
    table: np.ndarray,
    settings: Draw,
) -> tuple[Rows, Drawn]:
    """Runs every context once and draws the first token of every answer to it."""
    shards = request.shards
    prompts = {turn.context.tobytes(): turn.context for turn in turns}
    shape = (count_bucket(len(prompts), multiple=shards), width)
    tokens, pad = np.zeros(shape, np.int32), np.full(shape[0], width - 1, np.int32)
    for row, prompt in enumerate(prompts.values()):
        pad[row] = width - len(prompt)
        tokens[row, pad[row] :] = prompt
    place = {content: row for row, content in enumerate(prompts)}
    size = count_bucket(len(turns), multiple=shards)
    size = min(size, most_rows(request.max_batch, shards=shards))
    source, index, used = (
        np.zeros(size, np.int32),
        np.zeros((size, 2), np.int32),
        np.ones(size, bool),
    )
    source[: len(turns)] = [place[turn.context.tobytes()] for turn in turns]
    index[: len(turns)] = [(turn.prompt_index, turn.sample_index) for turn in turns]
    used[len(turns) :] = False
    policy: dict[str, Any] = {
        "model": request.model,
        "precision": request.precision,
        "record": request.record,
    }
    cache, logits = start(request.weights, request.put(tokens), request.put(pad), **policy)
    seed = request.params.seed
    key = jax.random.fold_in(jax.random.key(seed % 2**32, impl="threefry2x32"), seed // 2**32)
    return begin(
        cache,
        logits,
        pad,
        source=request.put(source),
        answer=request.put(index),
        key=key,
        tail=request.put(empty_tail(size, table)),
        used=request.put(used),
        table=table,
        settings=settings,
        slots=slots,
    )


def _move(
    rows: Rows,
    progress: list[_Progress | None],
    source: list[int],
    request: Request,
    *,
    slots: int,
) -> tuple[Rows, list[_Progress | None]]:
    """Takes the rows `source` into a batch of this many slots, smaller if they fit one."""
    if len(source) == len(progress):
        return grow(rows, slots=slots), progress
    size = fewer_rows(len(progress), shards=request.shards)
    filler = size - len(source)
    used = np.arange(size) < len(source)
    rows = move(
        rows,
        request.put(np.array(source + [0] * filler, np.int32)),
        request.put(used),
        slots=slots,
    )
    return rows, [progress[row] for row in source] + [None] * filler
