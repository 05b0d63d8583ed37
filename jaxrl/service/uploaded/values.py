"""Arrays of one datum, padded along the tokens, with the shapes that torch would give them.

Entries after the last token repeat the last one, so that an operation on single entries makes no
number there that the tokens do not have; reductions leave them out.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Value(NamedTuple):
    """An array of one datum.

    Attributes:
      array: padded along the tokens.
      axes: the size of each axis; one of tokens is "T", or "T-n" with n cut off.
      count: the number of tokens, i32.
    """

    array: jax.Array
    axes: tuple[int | str, ...]
    count: jax.Array

    def length(self, axis: int) -> jax.Array | int:
        """Returns the number of entries on an axis, without padding."""
        size = self.axes[axis]
        return size if isinstance(size, int) else jnp.maximum(self.count - cut(size), 0)

    def size(self, axes: Sequence[int]) -> jax.Array:
        """Returns the number of entries on several axes, f32."""
        found = jnp.float32(1)
        for axis in axes:
            found = found * self.length(axis)
        return found

    def like(self, array: jax.Array, axes: Sequence[int | str] | None = None) -> "Value":
        """Makes another array of the datum."""
        return Value(array, self.axes if axes is None else tuple(axes), self.count)

    def taken(self, axis: int, index: jax.Array) -> "Value":
        """Takes entries of an axis, whose size stays."""
        return self.like(jnp.take(self.array, index, axis=axis, mode="clip"))

    def padded(self, axis: int) -> "Value":
        """Repeats the last token of an axis in the padding."""
        if isinstance(self.axes[axis], int):
            return self
        last = jnp.maximum(self.length(axis) - 1, 0)
        return self.taken(axis, jnp.minimum(jnp.arange(self.array.shape[axis]), last))

    def filled(self, axes: Sequence[int], fill: Any) -> jax.Array:
        """Returns the array with other numbers in the padding of these axes."""
        array = self.array
        for axis in axes:
            if isinstance(self.axes[axis], str):
                inside = jnp.arange(array.shape[axis]) < self.length(axis)
                shape = [1] * array.ndim
                shape[axis] = -1
                array = jnp.where(inside.reshape(shape), array, jnp.asarray(fill, array.dtype))
        return array


class Dtype(str):
    """The name of a dtype in a graph."""


def cut(axis: str) -> int:
    """Returns how many tokens an axis leaves out."""
    return int(axis[2:] or 0)


def shortened(axis: str, more: int) -> str:
    """Names an axis of tokens with `more` of them left out."""
    found = cut(axis) + more
    return f"T-{found}" if found else "T"


def joined(values: Sequence[Value]) -> tuple[int | str, ...]:
    """Returns the axes after broadcasting; raises ValueError if they do not fit."""
    rank = max(len(one.axes) for one in values)
    found: list[int | str] = []
    for place in range(-rank, 0):
        sizes = {one.axes[place] for one in values if len(one.axes) >= -place} - {1}
        if len(sizes) > 1:
            raise ValueError(f"shapes {shown(values)} do not broadcast")
        found.append(next(iter(sizes), 1))
    if sum(isinstance(size, str) for size in found) > 1:
        raise ValueError(f"shapes {shown(values)} make a table of tokens by tokens")
    if sum(isinstance(size, int) and size > 1 for size in found) > 1:
        raise ValueError(f"shapes {shown(values)} make a table of targets by targets")
    return tuple(found)


def shown(values: Sequence[Value]) -> str:
    """Writes shapes for a message."""
    return " and ".join(f"[{', '.join(map(str, one.axes))}]" for one in values)


def entrywise(function: Callable[..., Any], *given: Any) -> Value:
    """Applies a function of arrays and numbers to single entries, after broadcasting."""
    values = [one for one in given if isinstance(one, Value)]
    if not values:
        raise ValueError("no argument is a tensor")
    for one in given:
        if not isinstance(one, (Value, int, float)):
            raise ValueError(f"{one!r} is neither a tensor nor a number")
    axes = joined(values)
    return values[0].like(function(*(x.array if isinstance(x, Value) else x for x in given)), axes)


def dims(value: Value, dim: Any) -> tuple[int, ...]:
    """Returns the axes that torch's `dim` names, from 0; all of them for None."""
    rank = len(value.axes)
    if dim is None:
        return tuple(range(rank))
    found = set()
    for one in dim if isinstance(dim, (list, tuple)) else (dim,):
        most = max(rank, 1)  # a number has the axes 0 and -1, which are none
        if type(one) is not int or not -most <= one < most:
            raise ValueError(f"dim = {dim!r} does not fit the shape {shown([value])}")
        found |= {one % rank} if rank else set()
    return tuple(sorted(found))


def reduced(value: Value, axes: Sequence[int], array: jax.Array, *, keepdim: bool) -> Value:
    """Makes a value of the result of a reduction over some axes."""
    kept = [1 if i in axes else size for i, size in enumerate(value.axes)]
    left = [size for i, size in enumerate(value.axes) if i not in axes]
    return value.like(array, kept if keepdim else left)
