"""Compiled decoding of a batch: draw the first tokens, decode a segment, change its rows.

Between segments the host refills ended rows, enlarges the cache or shrinks the batch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxrl.core.compiled import jit_by_precision, jit_forward
from jaxrl.core.kept import RECORD
from jaxrl.core.precision import Precision
from jaxrl.models.model import Model
from jaxrl.models.spec import Params
from jaxrl.sampling.embedded.cache import Cache
from jaxrl.sampling.embedded.draw_token import Drawn, DrawSettings, RowSettings, draw_tokens
from jaxrl.sampling.embedded.kv_cache import decode_step
from jaxrl.sampling.embedded.stopping import Ending, Stops, advance, widened

SEGMENT = 64  # most tokens per row between two visits to the host


@struct.dataclass
class RowPlan:
    """Assignment of a batch's rows to prompts."""

    prompt: jax.Array | np.ndarray  # i32[B], row of the prompt in the prefill
    index: jax.Array | np.ndarray  # i32[B, 2], prompt and sample index of the completion
    limit: jax.Array | np.ndarray  # i32[B], most tokens; 0 for rows that only pad the batch
    ending: Ending  # of completions without tokens
    own: RowSettings | None = None  # of turns with settings of their own


@struct.dataclass
class RowStates:
    """Completions in progress, one per row. An ended row stays until another takes its place;
    tokens drawn for it are ignored."""

    token: jax.Array  # i32[B], the last one drawn; not in the cache yet
    context: jax.Array  # i32[B], tokens before the completion
    key: jax.Array  # key[B]
    ending: Ending
    length: jax.Array  # i32[B], tokens of the completion
    limit: jax.Array  # i32[B], most tokens of it; 0 in rows that only pad the batch
    stopped: jax.Array  # bool[B], by a stop sequence or text
    own: RowSettings | None = None  # of turns with settings of their own

    @property
    def positions(self) -> jax.Array:
        """Positions of the last tokens, hence their slots, i32[B]."""
        return self.context + self.length - 1

    @property
    def running(self) -> jax.Array:
        """Rows that have not ended, bool[B]."""
        return ~self.stopped & (self.length < self.limit)


@struct.dataclass
class DecodeState:
    """A batch of completions in progress."""

    cache: Cache
    rows: RowStates


@struct.dataclass
class Segment:
    """Tokens drawn by one call; only the first `count` of N entries are valid."""

    drawn: Drawn  # [N, B, ...]
    count: jax.Array  # i32[]

    def append(self, drawn: Drawn) -> "Segment":
        """Returns the segment with one more token of each row, [B, ...]."""
        more = jax.tree.map(lambda x, new: x.at[self.count].set(new), self.drawn, drawn)
        return Segment(more, self.count + 1)


def no_tokens(size: int, rows: int, *, settings: DrawSettings) -> Segment:
    """Returns a segment with room for `size` tokens of each row."""
    shape = (size, rows)
    kept = jnp.zeros((*shape, RECORD), jnp.uint8) if settings.record else None
    return Segment(Drawn(jnp.zeros(shape, jnp.int32), jnp.zeros(shape), kept), jnp.int32(0))


@jit_forward
def row_experts(experts: jax.Array, row: jax.Array) -> jax.Array:
    """Returns the experts [S, L, k] of one row of a cache's [L, B, S, k]."""
    return experts[:, row].transpose(1, 0, 2)


@functools.partial(jit_forward, sums="fixed")
def draw_first(
    logits: jax.Array, lengths: jax.Array, *, plan: RowPlan, key: jax.Array, settings: DrawSettings
) -> tuple[RowStates, Segment]:
    """Draws the first tokens of a batch from the logits [N, V] after N prompts of `lengths` i32[N]
    tokens, with the request's key[], or key[B] of each row's own."""
    key = completion_keys(key, plan.index)
    settings = settings if plan.own is None else plan.own.drawing(settings)
    prompt, limit = jnp.asarray(plan.prompt), jnp.asarray(plan.limit)
    drawn, ending, stopped = draw_next(
        logits[prompt], key, jnp.zeros_like(prompt), plan.ending, settings=settings
    )
    states = RowStates(
        token=drawn.tokens,
        context=lengths[prompt],
        key=key,
        ending=ending,
        length=jnp.ones_like(prompt),
        limit=limit,
        stopped=stopped,
        own=plan.own,
    )
    return states, Segment(jax.tree.map(lambda x: x[None], drawn), jnp.int32(1))


@jit_by_precision(static_argnames=("model", "precision"), donate_argnames=("state",))
def decode_segment(
    params: Params,
    state: DecodeState,
    *,
    most: jax.Array | np.int32,
    floor: jax.Array | np.int32,
    settings: DrawSettings,
    model: Model,
    precision: Precision,
) -> tuple[DecodeState, Segment]:
    """Draws up to `most` tokens per row, and at most SEGMENT; returns the new state and the tokens.

    Stops early when the cache has no slot left for a running row, or when at most `floor` rows run.
    """
    out = no_tokens(SEGMENT, len(state.rows.token), settings=settings)
    adapters = None if state.rows.own is None else state.rows.own.adapters
    own = None if adapters is None else adapters.sorted()

    def more(carry: tuple[DecodeState, Segment]) -> jax.Array:
        state, out = carry
        rows = state.rows
        full = jnp.any(rows.running & (rows.positions >= state.cache.slots))
        return ~full & (out.count < jnp.minimum(most, SEGMENT)) & (jnp.sum(rows.running) > floor)

    def step(carry: tuple[DecodeState, Segment]) -> tuple[DecodeState, Segment]:
        state, out = carry
        rows = state.rows
        cache, logits = decode_step(
            params,
            state.cache,
            rows.token,
            positions=rows.positions,
            model=model,
            precision=precision,
            own=own,
        )
        mine = settings if rows.own is None else rows.own.drawing(settings)
        drawn, ending, stopped = draw_next(
            logits, rows.key, rows.length, rows.ending, settings=mine
        )
        rows = dataclasses.replace(
            rows,
            token=drawn.tokens,
            ending=ending,
            length=rows.length + rows.running,
            stopped=rows.stopped | (stopped & rows.running),
        )
        return DecodeState(cache, rows), out.append(drawn)

    return lax.while_loop(more, step, (state, out))


@functools.partial(jit_forward, static_argnames=("slots",))
def take_cache_rows(cache: Cache, source: jax.Array, *, slots: int) -> Cache:
    """Returns a cache of the rows `source`, i32[B], with `slots` slots."""

    # Layer by layer: rows that change devices are gathered from all of them, and no device has
    # memory for a whole gathered cache.
    def take(x: jax.Array, *, slots: int, axis: int) -> jax.Array:
        return lax.map(lambda layer: _resize(layer[source], slots=slots, axis=axis), x)

    def take_states(x: jax.Array) -> jax.Array:
        return lax.map(lambda layer: layer[source], x)

    linear = jax.tree.map(take_states, cache.linear)
    cache = _by_part(functools.partial(take, slots=slots), cache)
    return dataclasses.replace(cache, linear=linear)


@functools.partial(jit_forward, donate_argnames=("cache",))
def replace_cache_rows(cache: Cache, other: Cache, source: jax.Array, replaced: jax.Array) -> Cache:
    """Replaces the rows bool[B] `replaced` by the rows `source`, i32[B], of another cache without
    linear layers."""

    def replace(x: jax.Array, more: jax.Array, *, slots: int, axis: int) -> jax.Array:
        chosen = replaced.reshape(-1, *(1,) * (x.ndim - 2))

        # Layer by layer and in place, see `take_cache_rows`.
        def layer(i: jax.Array, x: jax.Array) -> jax.Array:
            new = _resize(more[i][source], slots=slots, axis=axis)
            return x.at[i].set(jnp.where(chosen, new, x[i]))

        return lax.fori_loop(0, len(x), layer, x)

    return _by_part(functools.partial(replace, slots=cache.slots), cache, other)


@functools.partial(jit_forward, static_argnames=("slots",))
def grow_cache(state: DecodeState, *, slots: int) -> DecodeState:
    """Extends the cache to `slots` slots. Rows stay in place, so no data moves between devices."""
    cache = _by_part(functools.partial(_resize, slots=slots), state.cache)
    return dataclasses.replace(state, cache=cache)


@functools.partial(jit_forward, sums="fixed")
def set_own(rows: RowStates, own: RowSettings, stops: Stops) -> RowStates:
    """Gives rows settings of their own anew. Those of a row in progress are the same ones, but
    their arrays may be larger; `stops` are the batch's."""
    return dataclasses.replace(rows, own=own, ending=widened(rows.ending, stops))


@functools.partial(jit_forward, static_argnames=("slots",))
def take_rows(state: DecodeState, source: jax.Array, used: jax.Array, *, slots: int) -> DecodeState:
    """Moves the rows `source`, i32[B], to a batch with `slots` slots; bool[B] `used` is False for
    rows that only pad the batch."""
    rows = jax.tree.map(lambda x: x[source], state.rows)
    rows = dataclasses.replace(rows, limit=jnp.where(used, rows.limit, 0))
    return DecodeState(take_cache_rows.__wrapped__(state.cache, source, slots=slots), rows)


@functools.partial(jit_forward, donate_argnames=("state",))
def put_rows(
    state: DecodeState, new: DecodeState, first: Segment, rows: jax.Array
) -> tuple[DecodeState, Segment]:
    """Puts completions that have just begun into `rows`, i32[A], of a batch; rows from B on are
    skipped. `new` has at most as many slots as the batch.

    Returns:
      The batch, and the first tokens in its rows; 0 in all other rows.
    """

    def put(x: jax.Array, more: jax.Array) -> jax.Array:
        return x.at[rows].set(more, mode="drop")

    # Layer by layer and in place, see `take_cache_rows`.
    def put_part(x: jax.Array, more: jax.Array) -> jax.Array:
        missing = [
            (0, size - have if axis > 1 else 0)
            for axis, (size, have) in enumerate(zip(x.shape, more.shape, strict=True))
        ]

        def layer(i: jax.Array, x: jax.Array) -> jax.Array:
            return x.at[i, rows].set(jnp.pad(more[i], missing[1:]), mode="drop")

        return lax.fori_loop(0, len(x), layer, x)

    state = DecodeState(
        jax.tree.map(put_part, state.cache, new.cache), jax.tree.map(put, state.rows, new.rows)
    )
    batch = len(state.rows.token)
    drawn = jax.tree.map(
        lambda x: put(jnp.zeros((batch, *x.shape[2:]), x.dtype), x[0])[None], first.drawn
    )
    return state, Segment(drawn, first.count)


def completion_keys(key: jax.Array, index: jax.Array | np.ndarray) -> jax.Array:
    """Returns the key of each completion, key[B], from a request's and i32[B, 2] indices."""
    for part in index.T:
        key = jax.vmap(jax.random.fold_in, in_axes=(None if key.ndim == 0 else 0, 0))(key, part)
    return key


def draw_next(
    logits: jax.Array, key: jax.Array, index: jax.Array, ending: Ending, *, settings: DrawSettings
) -> tuple[Drawn, Ending, jax.Array]:
    """Draws tokens from logits [B, V], with a key per completion, key[B], and token index, i32[B],
    so that a completion does not depend on its batch.

    Returns:
      (the tokens, the new ends, bool[B] of completions that end).
    """
    keys = jax.vmap(jax.random.fold_in)(key, index)
    drawn = draw_tokens(logits, keys, settings=settings)
    return drawn, *advance(ending, drawn.tokens, settings.stops)


def _by_part(function: Callable[..., jax.Array], cache: Cache, *others: Cache) -> Cache:
    """Applies `function(part, *others' parts, axis=...)` to the parts of caches that have slots;
    `axis` is the axis of the slots, counted from the end."""

    def apply(name: str, axis: int) -> Any:
        parts = [getattr(one, name) for one in (cache, *others)]
        return None if parts[0] is None else function(*parts, axis=axis)

    parts = {"keys": apply("keys", -1 if cache.for_cpu else -2), "values": apply("values", -2)}
    return dataclasses.replace(cache, **parts, experts=apply("experts", -2))


def _resize(x: jax.Array, *, slots: int, axis: int) -> jax.Array:
    """Appends empty slots or removes the last ones."""
    more = slots - x.shape[axis]
    if more <= 0:
        return lax.slice_in_dim(x, 0, slots, axis=axis)
    return jnp.pad(x, [(0, more if i == x.ndim + axis else 0) for i in range(x.ndim)])
