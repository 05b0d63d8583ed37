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

    Args:
      segments: i32[B, T], of the queries.
      of_keys: i32[B, S].
      distance: i32[T, S], index of the query in the row less that of the key.
      window: see `Scoring`.
    """
    near = distance >= 0
    if window is not None:
        near &= distance < window
    return near[None] & (segments[:, :, None] == of_keys[:, None, :])


def in_tree(
    tree: Tree, keys: jax.Array, positions: jax.Array, queries: jax.Array, *, window: int | None
) -> jax.Array:
    """Computes which keys the queries see in rows that share prefixes: bool[B, T, S].

    Args:
      tree: the tree of the keys, [B, S].
      keys: i32[S], indices in the row.
      positions: i32[B, T], of the queries.
      queries: i32[T], indices in the row.
      window: see `Scoring`.
    """
    seen = (keys[None, None] <= queries[None, :, None]) & (
        queries[None, :, None] < tree.seen_until[:, None]
    )
    if window is None:
        return seen
    # The index counts the tokens of all branches in between, a window those of the own sequence.
    return seen & (positions[:, :, None] - tree.positions[:, None] < window)
