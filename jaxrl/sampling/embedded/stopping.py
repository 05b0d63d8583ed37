"""Ends of completions: detects the token sequences and the texts that end them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrl.sampling.base import SamplingParams

_ANY = -1  # in a table: matches every token
_NOTHING = -2  # in a tail: matches no token of a table


@struct.dataclass
class Stops:
    """The ends of a request's completions as arrays."""

    table: np.ndarray  # i32[M, S], see `stop_table`
    texts: tuple[np.ndarray, np.ndarray] | None  # `row_of` and `moves` of `StopTexts`


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
    tail = np.full((rows, stops.table.shape[1]), _NOTHING, np.int32)
    return Ending(tail, None if stops.texts is None else np.zeros(rows, np.int32))


def advance(ending: Ending, tokens: jax.Array, stops: Stops) -> tuple[Ending, jax.Array]:
    """Appends tokens, i32[B]; returns the new state, and bool[B], true for completions that end."""
    tail = jnp.concatenate([jnp.asarray(ending.tail), tokens[:, None]], axis=1)[:, 1:]
    same = (tail[:, None, :] == stops.table[None]) | (stops.table[None] == _ANY)
    ended = jnp.any(jnp.all(same, axis=-1), axis=-1)
    if stops.texts is None:
        return Ending(tail, None), ended
    row_of, moves = stops.texts
    row = jnp.take(jnp.asarray(row_of), tokens, mode="clip")
    text = jnp.asarray(moves)[row, jnp.asarray(ending.text)]
    return Ending(tail, text), ended | (text == moves.shape[1] - 1)
