"""Blocks of scores, for the kernels that hold a head of a row in a TPU's fast memory.

A block has the scores of some queries and keys that follow each other. Fast memory holds the
queries, keys and values of one head of a row, so that each is read once.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128  # of a TPU's vector unit
# Bytes of fast memory for a kernel, by chip.
_FAST = {"TPU v5 lite": 96, "TPU v5": 48, "TPU v6 lite": 96, "TPU7x": 48}
HIDDEN, MASKED, SEEN = range(3)  # a block: none, some or all of its scores count


class Settings(NamedTuple):
    """Static settings of one call."""

    block: int  # tokens of a block of queries and of keys
    window: int | None
    cap: float | None
    interpret: bool = False


class Tokens(NamedTuple):
    """The sequences of rows, and where the queries are in them."""

    of_queries: jax.Array  # i32[B, T]
    of_keys: jax.Array  # i32[B, S]
    first: jax.Array  # i32[], index of the first query among the keys


def fits(kind: str, *, queries: int, keys: int, head_dim: int, value_dim: int) -> bool:
    """Tells if one head of a row fits into the fast memory of this kind of device."""
    return needed(queries, keys, head_dim, value_dim) <= _FAST.get(kind, 0) * 2**20


def needed(queries: int, keys: int, head_dim: int, value_dim: int) -> int:
    """Counts the bytes that the gradients' kernel holds, which needs more than the other: blocks of
    16 bits that are read or written, twice each, sums in f32, and numbers of sequences and rows of
    f32, which fill whole tiles."""
    of_queries = 8 * head_dim + 4 * value_dim + 4 * head_dim + 3 * 2 * 32
    of_keys = 8 * (head_dim + value_dim) + 4 * (head_dim + value_dim) + 2 * 4 * LANES
    return queries * of_queries + keys * of_keys + 8 * 2**20  # the last: a block's scores


class HeadBlocks(NamedTuple):
    """Parts of arrays that a kernel holds while it computes one head of queries in one row. Its
    grid is rows, heads of keys, and the queries' heads that share each."""

    queries: int  # tokens of a row
    keys: int
    group: int  # heads of queries for each of keys

    def of_queries(self, width: int) -> Any:
        """For arrays [H, B * T, width]."""
        return _spec(self.queries, width, lambda b, h, g, *_: (h * self.group + g, b, 0))

    def of_keys(self, width: int) -> Any:
        """For arrays [K, B * S, width]."""
        return _spec(self.keys, width, lambda b, h, g, *_: (h, b, 0))

    def numbers(self) -> Any:
        """For a number for each query: [H, 1, B * T]."""
        return _spec(1, self.queries, lambda b, h, g, *_: (h * self.group + g, 0, b))

    def sequences(self) -> list[Any]:
        """For the arrays of `sequences`."""
        return [
            _spec(1, self.queries, lambda b, h, g, *_: (b, 0, 0)),
            _spec(self.keys, LANES, lambda b, h, g, *_: (b, 0, 0)),
        ]


def _spec(rows: int, columns: int, index: Any) -> Any:
    from jax.experimental import pallas  # slow to import

    return pallas.BlockSpec((None, rows, columns), index)


def sequences(tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """Returns the sequences of queries as a row, i32[B, 1, T], and of keys as columns,
    i32[B, S, LANES]: scores lie with the keys first."""
    wide = (*tokens.of_keys.shape, LANES)
    return tokens.of_queries[:, None], jnp.broadcast_to(tokens.of_keys[:, :, None], wide)


def pairs(tokens: Tokens, settings: Settings) -> jax.Array:
    """Tells of each block of scores if it counts: i32[B, blocks of keys, of queries]."""
    (low, high), (first, last) = (
        ranges(x, settings.block) for x in (tokens.of_queries, tokens.of_keys)
    )
    shared = (low[:, None] <= last[:, :, None]) & (first[:, :, None] <= high[:, None])
    one = (low[:, None] == last[:, :, None]) & (first[:, :, None] == high[:, None])
    i, j = jnp.arange(low.shape[1])[None, None], jnp.arange(first.shape[1])[None, :, None]
    # Index of a block's first query minus that of its first key.
    distance = tokens.first + (i - j) * settings.block
    within = settings.block - 1
    seen, whole = distance >= -within, distance >= within
    if settings.window is not None:
        seen &= distance - within < settings.window
        whole &= distance + within < settings.window
    return jnp.where(one & whole, SEEN, jnp.where(shared & seen, MASKED, HIDDEN))


def ranges(segments: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first and last sequence of each block of rows i32[B, T]; padding, numbered 0,
    comes last."""
    numbers = jnp.where(segments == 0, jnp.iinfo(jnp.int32).max, segments)
    numbers = numbers.reshape(len(segments), -1, block)
    return jnp.min(numbers, axis=2), jnp.max(numbers, axis=2)


def within(n: Any, block: int) -> Any:
    """Returns block `n` of a kernel's array as a slice."""
    from jax.experimental import pallas

    return pallas.ds(pallas.multiple_of(n * block, block), block)


def seen(i: Any, j: Any, first: Any, of_queries: Any, of_keys: Any, settings: Settings) -> Any:
    """Tells inside a kernel which keys of block `j` the queries of block `i` see: bool[keys,
    queries]. The sequences are i32[1, T] of the queries and i32[S, LANES] of the keys."""
    block = settings.block
    distance = first + (i - j) * block
    distance += lax.broadcasted_iota(jnp.int32, (block, block), 1)
    distance -= lax.broadcasted_iota(jnp.int32, (block, block), 0)
    found = distance >= 0
    found &= of_keys[within(j, block), :1] == of_queries[:, within(i, block)]
    if settings.window is not None:
        found &= distance < settings.window
    return found
