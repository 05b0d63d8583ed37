"""Recognises the token sequences that end an answer."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

_ANY = -1  # in a table: matches every token
_NOTHING = -2  # in a tail: matches no token of a table


def stop_table(stop: Sequence[Sequence[int]]) -> np.ndarray:
    """The sequences as i32[N, S], S the length of the longest; a shorter one matches anything
    before its first token."""
    longest = max(map(len, stop), default=0)
    table = np.full((len(stop), longest), _ANY, np.int32)
    for row, sequence in zip(table, stop, strict=True):
        row[longest - len(sequence) :] = sequence
    return table


def empty_tail(rows: int, table: np.ndarray) -> np.ndarray:
    """The last S tokens of answers that have not begun, i32[B, S]: a stop sequence must lie within
    the answer."""
    return np.full((rows, table.shape[1]), _NOTHING, np.int32)


def push(tail: jax.Array, tokens: jax.Array) -> jax.Array:
    """The tail after i32[B] more tokens."""
    return jnp.concatenate([tail, tokens[:, None]], axis=1)[:, 1:]


def ends(tail: jax.Array, table: jax.Array) -> jax.Array:
    """Whether each answer ends in a stop sequence, bool[B]."""
    same = (tail[:, None, :] == table[None]) | (table[None] == _ANY)
    return jnp.any(jnp.all(same, axis=-1), axis=-1)
