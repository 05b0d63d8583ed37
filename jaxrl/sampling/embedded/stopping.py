"""Stop sequences: detects the token sequences that end a completion."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

_ANY = -1  # in a table: matches every token
_NOTHING = -2  # in a tail: matches no token of a table


def stop_table(stop: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns stop sequences as i32[N, S]; shorter ones are padded at the front with a wildcard."""
    longest = max(map(len, stop), default=0)
    table = np.full((len(stop), longest), _ANY, np.int32)
    for row, sequence in zip(table, stop, strict=True):
        row[longest - len(sequence) :] = sequence
    return table


def empty_tail(rows: int, table: np.ndarray) -> np.ndarray:
    """Returns the last S tokens of `rows` empty completions, i32[B, S], which match no sequence: a
    stop sequence must lie within the completion."""
    return np.full((rows, table.shape[1]), _NOTHING, np.int32)


def push(tail: jax.Array, tokens: jax.Array) -> jax.Array:
    """Appends tokens, i32[B], to the tail, i32[B, S], and drops the oldest."""
    return jnp.concatenate([tail, tokens[:, None]], axis=1)[:, 1:]


def ends_in_stop(tail: jax.Array, table: jax.Array | np.ndarray) -> jax.Array:
    """Returns bool[B], true for rows that end in a stop sequence."""
    same = (tail[:, None, :] == table[None]) | (table[None] == _ANY)
    return jnp.any(jnp.all(same, axis=-1), axis=-1)
