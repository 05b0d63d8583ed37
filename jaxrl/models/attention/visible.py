"""The keys that a query sees: causality, segments, windows and shared prefixes, for all kernels."""

from typing import NamedTuple

import jax


class Tree(NamedTuple):
    """The tokens of rows that share prefixes."""

    seen_until: jax.Array  # i32[B, S], index in the row after the last token that sees this one
    positions: jax.Array  # i32[B, S], within the token's own sequence


def in_segments(
    segments: jax.Array, of_keys: jax.Array, distance: jax.Array, *, window: int | None
) -> jax.Array:
    """Computes which keys the queries see in rows of segments: bool[B, T, S].

    The queries have the segments i32[B, T] and the keys `of_keys` i32[B, S]. `distance` i32[T, S]
    is the index of the query in the row minus the index of the key.
    """
    near = distance >= 0
    if window is not None:
        near &= distance < window
    return near[None] & (segments[:, :, None] == of_keys[:, None, :])


def in_tree(
    tree: Tree, keys: jax.Array, positions: jax.Array, queries: jax.Array, *, window: int | None
) -> jax.Array:
    """Computes which keys the queries see in rows that share prefixes: bool[B, T, S].

    `tree` [B, S] belongs to the keys, `positions` i32[B, T] to the queries. `keys` i32[S] and
    `queries` i32[T] are indices in the row.
    """
    seen = (keys[None, None] <= queries[None, :, None]) & (
        queries[None, :, None] < tree.seen_until[:, None]
    )
    if window is None:
        return seen
    # Indices also count tokens of other branches; a window counts the sequence's own tokens.
    return seen & (positions[:, :, None] - tree.positions[:, None] < window)
