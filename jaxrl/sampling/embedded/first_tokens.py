"""The start of a batch: runs contexts through the decoder and draws the first tokens."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.core.buckets import count_bucket, length_bucket
from jaxrl.sampling.base import Turn
from jaxrl.sampling.embedded.cache import Cache
from jaxrl.sampling.embedded.decode_steps import (
    DecodeState,
    RowPlan,
    Segment,
    draw_first,
    replace_cache_rows,
    take_cache_rows,
)
from jaxrl.sampling.embedded.kv_cache import CHUNK, extend, prefill
from jaxrl.sampling.embedded.request import DecodeRequest
from jaxrl.sampling.embedded.stopping import no_ending
from jaxrl.sampling.embedded.turn_caches import KeptPrefix, Queued


def start_batch(
    queued: Sequence[Queued],
    request: DecodeRequest,
    *,
    shape: tuple[int, int],
    rows: int,
    slots: int,
) -> tuple[DecodeState, Segment]:
    """Computes the contexts of turns and draws the first token of every completion.

    Args:
      queued: at most `rows`; either all or none begin with kept prefixes.
      request: weights and settings.
      shape: the fewest prompts to compile for, and their length; not used with prefixes.
      rows: rows of the batch.
      slots: slots of its cache.
    """
    turns = [turn for turn, _ in queued]
    prefixes = [prefix for _, prefix in queued if prefix is not None]
    if prefixes:
        cache, logits, lengths = _extend(turns, prefixes, request, rows=rows, slots=slots)
        source = np.arange(rows, dtype=np.int32)
    else:
        cache, logits, lengths, source = _prefill(turns, request, shape=shape, rows=rows)
        cache = take_cache_rows(cache, request.put(source), slots=slots)
    settings = request.settings
    limit, index = np.zeros(rows, np.int32), np.zeros((rows, 2), np.int32)
    limit[: len(turns)] = [turn.max_tokens for turn in turns]
    index[: len(turns)] = [(turn.prompt_index, turn.sample_index) for turn in turns]
    plan, key = RowPlan(source, index, limit, no_ending(rows, settings.stops)), request.key
    if request.own is not None:
        places = [turn.prompt_index for turn in turns]
        index[: len(turns)] = request.own.index(places)
        plan = dataclasses.replace(plan, own=request.own.rows(places, size=rows))
        key = request.own.keys(places, size=rows)
    plan = jax.tree.map(request.put, plan)
    states, first = draw_first(logits, lengths, plan=plan, key=key, settings=settings)
    return DecodeState(cache, states), first


def _prefill(
    turns: Sequence[Turn], request: DecodeRequest, *, shape: tuple[int, int], rows: int
) -> tuple[Cache, jax.Array, np.ndarray, np.ndarray]:
    """Runs every distinct context once; returns the cache of N contexts, the logits after them,
    their lengths i32[N], and the context of each row, i32[B]."""
    row_of: dict[Any, int] = {}
    source, own = np.zeros(rows, np.int32), request.own
    contexts = [own.prefix[t.prompt_index] if own else t.context.tobytes() for t in turns]
    source[: len(turns)] = [row_of.setdefault(context, len(row_of)) for context in contexts]
    count = count_bucket(max(len(row_of), shape[0]), multiple=request.shards)
    tokens, lengths = np.zeros((count, shape[1]), np.int32), np.ones(count, np.int32)
    for turn, row in zip(turns, source, strict=False):
        lengths[row] = len(turn.context)
        tokens[row, : lengths[row]] = turn.context
    adapters = None
    if own is not None:
        named = zip(source.tolist(), turns, strict=False)
        place_of = {row: turn.prompt_index for row, turn in named}
        adapters = own.adapters([place_of[row] for row in range(len(row_of))], size=count)
    cache, logits = prefill(
        request.weights,
        request.put(tokens),
        request.put(lengths),
        model=request.model,
        precision=request.precision,
        record_experts=request.record_experts,
        for_cpu=request.on_cpu,
        own=jax.tree.map(request.put, adapters),
    )
    return cache, logits, lengths, source


def _extend(
    turns: Sequence[Turn],
    prefixes: Sequence[KeptPrefix],
    request: DecodeRequest,
    *,
    rows: int,
    slots: int,
) -> tuple[Cache, jax.Array, np.ndarray]:
    """Runs the tokens after the kept prefix of each turn; returns the cache of the batch, the
    logits after the contexts, and their lengths i32[B]."""
    starts, lengths = np.zeros(rows, np.int32), np.ones(rows, np.int32)
    starts[: len(turns)] = [len(prefix.tokens) for prefix in prefixes]
    lengths[: len(turns)] = [len(turn.context) for turn in turns]
    width = length_bucket(max(lengths - starts), step=CHUNK)
    tokens = np.zeros((rows, width), np.int32)
    for row, (turn, start) in enumerate(zip(turns, starts, strict=False)):
        tokens[row, : len(turn.context) - start] = turn.context[start:]
    cache, logits = extend(
        request.weights,
        _gather(prefixes, request, rows=rows, slots=slots),
        request.put(tokens),
        starts=request.put(starts),
        lengths=request.put(lengths - starts),
        model=request.model,
        precision=request.precision,
    )
    return cache, logits, lengths


def _gather(
    prefixes: Sequence[KeptPrefix], request: DecodeRequest, *, rows: int, slots: int
) -> Cache:
    """Copies kept rows into a new cache for a batch."""
    gathered = None
    for kept in {id(prefix.cache): prefix.cache for prefix in prefixes}.values():
        source, mine = np.zeros(rows, np.int32), np.zeros(rows, bool)
        for row, prefix in enumerate(prefixes):
            if prefix.cache is kept:
                source[row], mine[row] = prefix.row, True
        source, mine = request.put(source), request.put(mine)
        if gathered is None:
            gathered = take_cache_rows(kept, source, slots=slots)
        else:
            gathered = replace_cache_rows(gathered, kept, source, mine)
    assert gathered is not None
    return gathered
