"""The compiled parts of sampling: begin a batch, draw some tokens, move rows to another batch.

A batch is begun once, decoded in segments, and between segments given more slots or fewer rows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxrl.core.precision import Precision
from jaxrl.models.decoder import Model
from jaxrl.models.spec import Params
from jaxrl.sampling.embedded.draw_token import Draw, choose
from jaxrl.sampling.embedded.kv_cache import Cache, extend, prefill
from jaxrl.sampling.embedded.stopping import ends, push

SEGMENT = 64  # most tokens per row between two visits to the host


@struct.dataclass
class Rows:
    """A batch of answers in progress. All rows are equally far; those that have ended stay, and
    what is drawn for them is ignored."""

    cache: Cache
    token: jax.Array  # i32[B], the last one drawn; not in the cache yet
    slot: jax.Array  # i32[], where it belongs
    drawn: jax.Array  # i32[], tokens drawn per row
    pad: jax.Array  # i32[B], unused slots before the prompt
    key: jax.Array  # key[B]
    tail: jax.Array  # i32[B, S], see `stopping`
    length: jax.Array  # i32[B], tokens of the answer
    ended: jax.Array  # bool[B], by a stop sequence


@struct.dataclass
class Drawn:
    """Tokens drawn by one call; only the first `count` entries count."""

    tokens: jax.Array  # i32[N, B]
    logprobs: jax.Array  # f32[N, B]
    count: jax.Array  # i32[]


@functools.partial(jax.jit, static_argnames=("model", "precision", "record"))
def start(
    params: Params,
    tokens: jax.Array,
    pad: jax.Array,
    *,
    model: Model,
    precision: Precision,
    record: bool,
) -> tuple[Cache, jax.Array]:
    """`prefill`, with its shapes, compiled."""
    return prefill(params, tokens, pad, model=model, precision=precision, record=record)


@jax.jit
def sent(experts: jax.Array, row: jax.Array) -> jax.Array:
    """The experts [S, L, k] of one row of a cache."""
    return experts[:, row].transpose(1, 0, 2)


@functools.partial(jax.jit, static_argnames=("slots",))
def begin(
    cache: Cache,
    logits: jax.Array,
    pad: jax.Array,
    *,
    source: jax.Array,
    answer: jax.Array,
    key: jax.Array,
    tail: jax.Array,
    used: jax.Array,
    table: jax.Array,
    settings: Draw,
    slots: int,
) -> tuple[Rows, Drawn]:
    """Repeats each prompt for its answers and draws their first tokens.

    Args:
      cache: of the prompts.
      logits: [N, V] after each prompt.
      pad: i32[N].
      source: i32[B], the prompt of each row.
      answer: i32[B, 2], the prompt's index and the answer's index within its group.
      key: key[], of the request.
      tail: i32[B, S], empty.
      used: bool[B], False for rows that only fill the batch.
      table: i32[M, S] stop sequences.
      settings: how tokens are drawn.
      slots: size of the new cache.
    """
    width = cache.slots
    for index in answer.T:
        key = jax.vmap(jax.random.fold_in, in_axes=(None if key.ndim == 0 else 0, 0))(key, index)
    token, logprob, tail, ended = _draw(
        logits[source], key, jnp.int32(0), tail, table=table, settings=settings
    )
    rows = Rows(
        cache=_resize(cache, source, slots=slots),
        token=token,
        slot=jnp.int32(width),
        drawn=jnp.int32(1),
        pad=pad[source],
        key=key,
        tail=tail,
        length=used.astype(jnp.int32),
        ended=ended | ~used,
    )
    return rows, Drawn(token[None], logprob[None], jnp.int32(1))


@functools.partial(jax.jit, static_argnames=("model", "precision"), donate_argnames=("rows",))
def decode(
    params: Params,
    rows: Rows,
    *,
    max_tokens: jax.Array,
    floor: jax.Array,
    table: jax.Array,
    settings: Draw,
    model: Model,
    precision: Precision,
) -> tuple[Rows, Drawn]:
    """Draws up to SEGMENT tokens a row: `Drawn` of [SEGMENT, B].

    It stops early when the cache is full, `max_tokens` are drawn, or no more than `floor` rows are
    still running.
    """
    batch = rows.token.shape[0]
    out = Drawn(jnp.zeros((SEGMENT, batch), jnp.int32), jnp.zeros((SEGMENT, batch)), jnp.int32(0))

    def more(carry: tuple[Rows, Drawn]) -> jax.Array:
        rows, out = carry
        room = (rows.slot < rows.cache.slots) & (rows.drawn < max_tokens) & (out.count < SEGMENT)
        return room & (jnp.sum(~rows.ended) > floor)

    def step(carry: tuple[Rows, Drawn]) -> tuple[Rows, Drawn]:
        rows, out = carry
        cache, logits = extend(
            params,
            rows.cache,
            rows.token,
            slot=rows.slot,
            pad=rows.pad,
            model=model,
            precision=precision,
        )
        token, logprob, tail, ended = _draw(
            logits, rows.key, rows.drawn, rows.tail, table=table, settings=settings
        )
        out = Drawn(
            out.tokens.at[out.count].set(token),
            out.logprobs.at[out.count].set(logprob),
            out.count + 1,
        )
        rows = dataclasses.replace(
            rows,
            cache=cache,
            token=token,
            slot=rows.slot + 1,
            drawn=rows.drawn + 1,
            tail=tail,
            length=rows.length + ~rows.ended,
            ended=rows.ended | ended,
        )
        return rows, out

    return lax.while_loop(more, step, (rows, out))


@functools.partial(jax.jit, static_argnames=("slots",))
def grow(rows: Rows, *, slots: int) -> Rows:
    """The same rows with this many slots. None changes its place, so nothing is sent."""
    return dataclasses.replace(rows, cache=_padded(rows.cache, slots=slots))


@functools.partial(jax.jit, static_argnames=("slots",))
def move(rows: Rows, source: jax.Array, used: jax.Array, *, slots: int) -> Rows:
    """Takes the rows `source`, i32[B], into a batch with this many slots; bool[B] `used` is False
    for those that only fill it."""
    return dataclasses.replace(
        rows,
        cache=_resize(rows.cache, source, slots=slots),
        token=rows.token[source],
        pad=rows.pad[source],
        key=rows.key[source],
        tail=rows.tail[source],
        length=rows.length[source],
        ended=rows.ended[source] | ~used,
    )


def _draw(logits, key, position, tail, *, table, settings):
    """A key per (row, position): an answer does not depend on the batch that it is drawn in."""
    keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(key, position)
    token, logprob = choose(logits, keys, settings=settings)
    tail = push(tail, token)
    return token, logprob, tail, ends(tail, table)


def _resize(cache: Cache, source: jax.Array, *, slots: int) -> Cache:
    # Layer by layer: rows that change devices are gathered from all of them, and a whole cache of
    # that kind has room on none.
    def one(layer: Cache) -> Cache:
        return _padded(jax.tree.map(lambda x: x[source], layer), slots=slots)

    return lax.map(one, cache)


def _padded(cache: Cache, *, slots: int) -> Cache:
    """A cache, or a layer of one, with empty slots at its end."""
    more = slots - cache.slots

    def pad(x: jax.Array, axis: int) -> jax.Array:
        return jnp.pad(x, [(0, more if i == x.ndim + axis else 0) for i in range(x.ndim)])

    experts = None if cache.experts is None else pad(cache.experts, -2)
    return Cache(pad(cache.keys, -1), pad(cache.values, -2), experts)
