"""Indices and shapes of uploaded losses, as torch has them."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.service.uploaded.values import Value, dims, reduced, shortened, shown


def item(value: Any, key: Any) -> Any:
    """Indexes as torch does: along tokens 0, -1, and slices that leave out some at an end."""
    if not isinstance(value, Value):  # sizes
        return value[key]
    keys = list(key) if type(key) is tuple else [key]
    named = sum(one is not None and one is not Ellipsis for one in keys)
    spare = [slice(None)] * (len(value.axes) - named)
    at = keys.index(Ellipsis) if Ellipsis in keys else len(keys)
    axis = 0
    for one in [*keys[:at], *spare, *keys[at + 1 :]]:
        if axis >= len(value.axes) and one is not None:
            raise ValueError(f"the index {key!r} does not fit the shape {shown([value])}")
        value = _indexed(value, axis, one)
        axis += type(one) is not int
    return value


def _indexed(value: Value, axis: int, one: Any) -> Value:
    before, after = value.axes[:axis], value.axes[axis + 1 :]
    if one is None:
        whole = (*before, 1, *value.axes[axis:])
        return value.like(jnp.expand_dims(value.array, axis), whole)
    size = value.axes[axis]
    if type(one) is int:
        if (one not in (0, -1)) if isinstance(size, str) else not -size <= one < size:
            raise ValueError(f"the index {one} of an axis of size {size}; along tokens: 0 or -1")
        index = one if one >= 0 else value.length(axis) + one
        found = jnp.take(value.array, index, axis=axis, mode="clip")
        return value.like(found, (*before, *after))
    if not isinstance(one, slice):
        raise ValueError("an index must be a number or a slice; for a mask, use torch.where")
    begin, end = one.start or 0, -(one.stop or 0)
    if begin < 0 or end < 0 or one.step not in (None, 1):
        raise ValueError("a slice must have the form [a:], [:-b] or [a:-b]")
    if one.stop == 0 or (isinstance(size, int) and begin + end >= size):
        raise ValueError(f"the slice of an axis of size {size} is empty")
    # What leaves out all tokens keeps one, which does not count.
    first = min(begin, value.array.shape[axis] - 1)
    last = max(value.array.shape[axis] - end, first + 1)
    array = jax.lax.slice_in_dim(value.array, first, last, axis=axis)
    left = size - begin - end if isinstance(size, int) else shortened(size, begin + end)
    return value.like(array, (*before, left, *after)).padded(axis)


def squeeze(value: Value, dim: Any = None) -> Value:
    """Drops axes of size 1."""
    axes = tuple(axis for axis in dims(value, dim) if value.axes[axis] == 1)
    return reduced(value, axes, jnp.squeeze(value.array, axes), keepdim=False)


def unsqueeze(value: Value, dim: Any) -> Value:
    """Inserts an axis of size 1."""
    rank = len(value.axes)
    if type(dim) is not int or not -rank - 1 <= dim <= rank:
        raise ValueError(f"dim = {dim!r} does not fit the shape {shown([value])}")
    return _indexed(value, dim % (rank + 1), None)


def sizes(value: Value, dim: Any = None) -> Any:
    """Returns the number of entries on each axis, or on one."""
    found = tuple(value.like(value.size([axis]), ()) for axis in range(len(value.axes)))
    return found if dim is None else found[dims(value, dim)[0]]


def attribute(value: Value, name: Any) -> Any:
    """Returns the shape, the only attribute that has a counterpart."""
    if name != "shape":
        raise ValueError(f"the attribute {name!r} has no counterpart here; shape has")
    return sizes(value)
