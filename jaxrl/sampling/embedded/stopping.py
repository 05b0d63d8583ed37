"""Ends of completions: detects the token sequences and the texts that end them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.sampling.base import SamplingParams

_ANY = -1  # in a table: matches every token
_NOTHING = -2  # in a tail: matches no token of a table
NEVER = -3
"""Entry of a table of `Stops` that matches no token."""


@struct.dataclass
class Stops:
    """The ends of a request's completions as arrays. With ends of each row's own, `table` is
    i32[B, M, S], and `texts` are A stacked automata: i32[A, V], i32[A, R, S] and the states of
    complete texts i32[A], of which i32[B] `chosen` names each row's."""

    table: jax.Array | np.ndarray  # i32[M, S], see `stop_table`
    texts: tuple[np.ndarray, ...] | None  # `row_of` and `moves` of `StopTexts`
    chosen: jax.Array | np.ndarray | None = None


@struct.dataclass
class Ending:
    """Progress of completions towards their ends."""

    tail: jax.Array | np.ndarray  # i32[B, S], the last tokens
    text: jax.Array | np.ndarray | None  # i32[B], states of `StopTexts`; None without texts


def make_stops(params: SamplingParams) -> Stops:
    """Returns the ends of completions that a request asks for."""
    texts = params.stop_texts
    return Stops(stop_table(params.stop), None if texts is None else (texts.row_of, texts.moves))


def stop_table(stop: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns stop sequences as i32[N, S]; shorter ones are padded at the front with a wildcard."""
    longest = max(map(len, stop), default=0)
    table = np.full((len(stop), longest), _ANY, np.int32)
    for row, sequence in zip(table, stop, strict=True):
        row[longest - len(sequence) :] = sequence
    return table


def no_ending(rows: int, stops: Stops) -> Ending:
    """Returns the state of `rows` empty completions. Prompts do not count: an end must lie within
    the completion."""
    tail = np.full((rows, stops.table.shape[-1]), _NOTHING, np.int32)
    return Ending(tail, None if stops.texts is None else np.zeros(rows, np.int32))


def widened(ending: Ending, stops: Stops) -> Ending:
    """Returns the state of completions in progress for larger tables of ends."""
    more = stops.table.shape[-1] - ending.tail.shape[-1]
    tail = jnp.pad(ending.tail, ((0, 0), (more, 0)), constant_values=_NOTHING)
    begun = ending.text is None and stops.texts is not None
    return Ending(tail, jnp.zeros(len(tail), jnp.int32) if begun else ending.text)


def advance(ending: Ending, tokens: jax.Array, stops: Stops) -> tuple[Ending, jax.Array]:
    """Appends tokens, i32[B]; returns the new state, and bool[B], true for completions that end."""
    tail = jnp.concatenate([jnp.asarray(ending.tail), tokens[:, None]], axis=1)[:, 1:]
    table = stops.table if stops.table.ndim == 3 else stops.table[None]
    same = (tail[:, None, :] == table) | (table == _ANY)
    ended = jnp.any(jnp.all(same, axis=-1), axis=-1)
    if stops.texts is None:
        return Ending(tail, None), ended
    if (own := stops.chosen) is not None:
        row_of, moves, complete = map(jnp.asarray, stops.texts)
        row = row_of[own, jnp.minimum(tokens, row_of.shape[1] - 1)]
        text = moves[own, row, jnp.asarray(ending.text)]
        return Ending(tail, text), ended | (text == complete[own])
    row_of, moves = stops.texts
    row = jnp.take(jnp.asarray(row_of), tokens, mode="clip")
    text = jnp.asarray(moves)[row, jnp.asarray(ending.text)]
    return Ending(tail, text), ended | (text == moves.shape[1] - 1)
