"""Rows of a batch with adapters of their own: each adapter multiplies its own rows alone."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@struct.dataclass
class AdapterRows:
    """Names the adapter of each row of a batch.

    Attributes:
      which: i32[B], the adapter of each row; -1 for none.
      count: the number of adapters.
      most: the most rows of one. Rows beyond them, which only pad a batch, have none.
      parts: the number of devices that rows are divided over; no row moves to another one.
    """

    which: jax.Array | np.ndarray
    count: int = struct.field(pytree_node=False)
    most: int = struct.field(pytree_node=False)
    parts: int = struct.field(pytree_node=False)

    def sorted(self) -> "SortedRows":
        """Sorts the rows by adapter."""
        which = jnp.asarray(self.which).reshape(self.parts, -1)
        rows = which.shape[1]
        room = min(self.most, rows)
        none = self.count * room
        own = which[:, :, None] == jnp.arange(self.count)[None, None, :]
        before = jnp.sum(jnp.where(own, jnp.cumsum(own, axis=1) - 1, 0), axis=2)
        place = jnp.where((which >= 0) & (before < room), which * room + before, none)
        part = jnp.arange(self.parts)[:, None]
        row = jnp.zeros((self.parts, none), jnp.int32)
        row = row.at[part, place].set(jnp.arange(rows, dtype=jnp.int32), mode="drop")
        return SortedRows(row, place)


@struct.dataclass
class SortedRows:
    """Rows sorted by adapter, on each of P devices: A adapters have R places each.

    Attributes:
      row: i32[P, A * R], the row of each place; any row where there is none.
      place: i32[P, B / P], the place of each row; A * R for a row without an adapter.
    """

    row: jax.Array
    place: jax.Array

    def apply(self, function: Callable[[jax.Array, Any], jax.Array], x: Any, adapters: Any) -> Any:
        """Applies a function of rows [N, ...] and an adapter to each row and its own adapter.

        Args:
          function: is given one adapter of `adapters`.
          x: [B, ...].
          adapters: A of them, stacked along the first axis.

        Returns:
          [B, ...]; 0 in the rows that have no adapter.
        """
        parts, count = len(self.row), len(jax.tree.leaves(adapters)[0])
        local = x.reshape(parts, -1, *x.shape[1:])
        own = jax.vmap(lambda x, row: x[row])(local, self.row)
        own = own.reshape(parts, count, -1, *x.shape[1:]).swapaxes(0, 1)
        found = jax.vmap(function)(own.reshape(count, -1, *x.shape[1:]), adapters)
        found = found.reshape(count, parts, -1, *found.shape[2:]).swapaxes(0, 1)
        found = found.reshape(parts, -1, *found.shape[3:])
        back = jax.vmap(lambda y, place: y.at[place].get(mode="fill", fill_value=0))
        found = back(found, self.place)
        return found.reshape(len(x), *found.shape[2:])
