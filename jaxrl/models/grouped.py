"""Grouped products on NVIDIA GPUs, where XLA multiplies every row by the matrices of all groups.

Pallas hands these kernels to the Triton that XLA contains. Each program of a kernel computes one
block of the result from rows of one group.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.core.precision import DType, Precision

_COLUMNS = 128  # of a block of the result
_FEWEST, _MOST = 16, 128  # rows of one; Triton multiplies no fewer
_TERMS = 128  # bytes that a block reads of each row at a time


class Settings(NamedTuple):
    """Static settings of one call."""

    precision: Precision
    result: DType
    interpret: bool = False


def by_rows(
    x: jax.Array, y: jax.Array, sizes: jax.Array, *, axis: int, settings: Settings
) -> jax.Array:
    """Multiplies consecutive groups of rows of `x`, each by its own matrix.

    Args:
      x: [M, K], in `compute`.
      y: [G, N, K], or [G, K, N]; in `compute`.
      sizes: i32[G], rows in each group.
      axis: the axis of `y` that is summed over.
      settings: of the call.

    Returns:
      [M, N]; rows beyond the groups are undefined.
    """
    groups = len(sizes)
    # With fixed sums the block, hence the order within the hardware's products, is always the same.
    fixed = settings.precision.sums == "fixed"
    rows = _MOST if fixed else _rows_of_block(len(x), groups)
    # A group's blocks begin at its first row, so none has rows of two groups.
    blocks = (sizes + rows - 1) // rows
    ends, block_ends = jnp.cumsum(sizes), jnp.cumsum(blocks)
    number = jnp.arange(len(x) // rows + groups, dtype=jnp.int32)
    group = jnp.sum(number[:, None] >= block_ends[None, :], axis=1, dtype=jnp.int32)
    own = jnp.minimum(group, groups - 1)
    first = (ends - sizes)[own] + (number - (block_ends - blocks)[own]) * rows
    last = jnp.where(group < groups, jnp.minimum(first + rows, ends[own]), first)
    columns = y.shape[3 - axis]
    kernel = functools.partial(_rows_kernel, rows=rows, axis=axis, precision=settings.precision)
    return _call(
        kernel,
        (x, y, own, first, last),
        shape=(len(x), columns),
        grid=(-(-columns // _COLUMNS), len(number)),
        settings=settings,
    )


def by_groups(x: jax.Array, y: jax.Array, sizes: jax.Array, *, settings: Settings) -> jax.Array:
    """Computes `x.T @ y` for each group of rows: [M, A] and [M, B] -> [G, A, B]; zeros for an empty
    group. Arguments as in `by_rows`."""
    shape = (len(sizes), x.shape[1], y.shape[1])
    ends = jnp.cumsum(sizes)
    return _call(
        functools.partial(_groups_kernel, precision=settings.precision),
        (x, y, ends - sizes, ends),
        shape=shape,
        grid=(-(-shape[2] // _COLUMNS), -(-shape[1] // _COLUMNS), shape[0]),
        settings=settings,
    )


def _rows_of_block(rows: int, groups: int) -> int:
    """Returns a power of two: at most half of a group's mean rows, as each group's last block is
    half empty on average."""
    most = min(_MOST, rows // (2 * groups))
    return max(_FEWEST, 1 << max(0, most.bit_length() - 1))


def _call(kernel: Any, arrays: Any, *, shape: Any, grid: Any, settings: Settings) -> jax.Array:
    from jax.experimental import pallas  # slow to import
    from jax.experimental.pallas import triton

    return pallas.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(shape, settings.result),
        grid=grid,
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
        interpret=settings.interpret,
        # Each row is multiplied by one matrix, or by the same row of the other operand.
        metadata={"flops": str(2 * arrays[0].size * shape[-1])},
    )(*arrays)


def _rows_kernel(x, y, group, first, last, out, *, rows, axis, precision):
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    column, number = pallas.program_id(0), pallas.program_id(1)
    own, begin, end = group[number], first[number], last[number]
    terms = _TERMS // x.dtype.itemsize

    @pallas.when(begin < end)
    def _():
        at, columns = _Part(begin, rows, end), _Part.block(column, _COLUMNS, y.shape[3 - axis])

        def step(i, total):
            summed = _Part.block(i, terms, x.shape[1])
            both = (summed, columns) if axis == 1 else (columns, summed)
            left, right = _load(x, (at, summed)), _load(y, both, own)
            return total + triton.dot(left, right, trans_b=axis == 2, precision=precision.algorithm)

        total = jnp.zeros((rows, _COLUMNS), precision.accumulate)
        total = lax.fori_loop(0, -(-x.shape[1] // terms), step, total)
        _store(out, total, (at, columns))


def _groups_kernel(x, y, first, last, out, *, precision):
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    column, row, own = (pallas.program_id(i) for i in range(3))
    begin, end = first[own], last[own]
    terms = _TERMS // x.dtype.itemsize
    left, right = (_Part.block(i, _COLUMNS, z.shape[1]) for i, z in ((row, x), (column, y)))

    def step(i, total):
        summed = _Part(begin + i * terms, terms, end)
        parts = (_load(z, (summed, part)) for z, part in ((x, left), (y, right)))
        return total + triton.dot(*parts, trans_a=True, precision=precision.algorithm)

    total = jnp.zeros((_COLUMNS, _COLUMNS), precision.accumulate)
    total = lax.fori_loop(0, (end - begin + terms - 1) // terms, step, total)
    _store(out, total, (left, right), own)


class _Part(NamedTuple):
    """Consecutive places of an axis; those from `end` on are not read."""

    start: Any
    size: int
    end: Any = None  # None if all are there

    @classmethod
    def block(cls, number: Any, size: int, length: int) -> "_Part":
        return cls(number * size, size, length if length % size else None)


def _place(array, parts, own):
    """Returns a reference to parts of a matrix, of the group `own` if it is one of a stack, and the
    mask of the places that are there, if not all."""
    from jax.experimental import pallas

    here = tuple(pallas.ds(part.start, part.size) for part in parts)
    masks = [
        jnp.expand_dims(part.start + jnp.arange(part.size) < part.end, 1 - axis)
        for axis, part in enumerate(parts)
        if part.end is not None
    ]
    shape = tuple(part.size for part in parts)
    mask = None
    for one in masks:
        one = jnp.broadcast_to(one, shape)
        mask = one if mask is None else mask & one
    return array.at[here if own is None else (own, *here)], mask


def _load(array, parts, own=None):
    from jax.experimental.pallas import triton

    at, mask = _place(array, parts, own)
    return triton.load(at, mask=mask, other=None if mask is None else 0)


def _store(array, value, parts, own=None):
    from jax.experimental.pallas import triton

    at, mask = _place(array, parts, own)
    triton.store(at, value.astype(array.dtype), mask=mask)
