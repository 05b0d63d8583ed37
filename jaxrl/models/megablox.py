"""Products of groups of rows on TPUs, by jax's kernels (megablox), with blocks by shape.

Each kernel reads the matrices of the groups that have rows, and writes the dtype that is wanted.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.core.precision import DType

_LANES = 128  # of a TPU's vector unit
_ROWS = (512, 256, _LANES)  # in a block
_WIDEST = 2048  # columns of a block
_LARGEST = 12 * 2**20  # bytes of all blocks: a kernel has 16 MiB of fast memory without a flag


def fits(x: jax.Array) -> bool:
    """Tells if the kernels can multiply the rows of x[M, K]."""
    return x.dtype == jnp.bfloat16 and len(x) % _LANES == 0 and x.shape[1] % _LANES == 0


def rows_by_matrices(
    x: jax.Array,
    y: jax.Array,
    sizes: jax.Array,
    *,
    transposed: bool,
    result: DType,
    interpret: bool = False,
) -> jax.Array:
    """Multiplies the rows of each group by the group's matrix; sums are in f32.

    Args:
      x: bf16[M, K], see `fits`.
      y: bf16[G, K, N], or bf16[G, N, K] if `transposed`.
      sizes: i32[G], rows in each group.
      transposed: of `y`.
      result: dtype of the result.
      interpret: runs the kernel without a TPU, slowly.

    Returns:
      [M, N]; rows beyond the groups are undefined.
    """
    kernels: Any = _kernels()
    columns = y.shape[1] if transposed else y.shape[2]
    blocks = _blocks(x.shape, columns, groups=len(sizes), summed=1, result=result)
    return kernels.gmm(x, y, sizes, result, blocks, transpose_rhs=transposed, interpret=interpret)


def rows_by_rows(
    x: jax.Array, y: jax.Array, sizes: jax.Array, *, result: DType, interpret: bool = False
) -> jax.Array:
    """Multiplies x[M, A] and y[M, B] over the rows of each group: [G, A, B], 0 for an empty group.
    Takes the other arguments of `rows_by_matrices`."""
    kernels: Any = _kernels()
    blocks = _blocks(x.shape, y.shape[1], groups=len(sizes), summed=0, result=result)
    return kernels.tgmm(x.swapaxes(0, 1), y, sizes, result, blocks, interpret=interpret)


def _kernels() -> Any:
    import importlib  # the package has a function of the module's name

    return importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")


def _blocks(shape, columns, *, groups, summed, result):
    """Chooses the rows, columns of x, and columns of the result of a block."""
    rows, wide = shape
    # A block that several groups share is multiplied once for each of them.
    most = max(_LANES, 2 * rows // groups)
    block = next(size for size in _ROWS if (rows % size == 0 and size <= most) or size == _LANES)
    x, y = _part(wide, _WIDEST), _part(columns, _WIDEST)
    while _bytes(block, x, y, summed=summed, result=result) > _LARGEST:
        x, y = (_part(wide, x // 2), y) if x > y else (x, _part(columns, y // 2))
    return block, x, y


def _bytes(rows, x, y, *, summed, result):
    """Counts the bytes of two blocks of each operand and of the result, and of the f32 sums."""
    pairs = (rows * x, x * y, rows * y)
    operands = pairs[:2] if summed else (pairs[0], pairs[2])
    made = pairs[2] if summed else pairs[1]
    return 4 * sum(operands) + made * (2 * jnp.dtype(result).itemsize + 4)


def _part(size: int, most: int) -> int:
    """Divides a dimension: into equal parts of at most `most` and multiples of the lanes, if there
    are any that are not much smaller."""
    if size <= most:
        return size
    most = most // _LANES * _LANES
    equal = (part for part in range(most, most // 2, -_LANES) if size % part == 0)
    return next(equal, most)
