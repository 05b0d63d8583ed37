"""Matrix products: the one place that multiplies matrices, as the `Precision` says.

Operands are rounded to `compute`. Sums are in `accumulate`, which is also the result's dtype.
`precision.algorithm` says how the products of f32 operands are computed.
"""

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxrl.core.gpu_kernels import on_nvidia
from jaxrl.core.half_bits import from_bits, to_bits
from jaxrl.core.precision import DType, Precision
from jaxrl.core.processor import may_multiply_bf16
from jaxrl.models import grouped
from jaxrl.sharding.gradients import GradientSum

# Checkpoint name of the outputs of matrix products, rounded: a remat policy may keep them.
OUTPUT = "product"

Axes = tuple[int, ...]
Form = Literal["nn", "nt", "tn"]  # x @ y, x @ y.T, x.T @ y

# Terms that are added in one product where `sums` is fixed. XLA's CPU kernels cut longer sums into
# pieces by the number of rows and the size of the processor's caches.
ADDED = 512

# Largest matrix, in numbers, by which XLA on CPU multiplies few rows in the same order as many.
_SMALL = 32768

# Most columns for which transposing the result costs less than an operand: the head has more.
_WIDEST = 2048


def product(
    x: jax.Array,
    y: jax.Array,
    *,
    contract: tuple[int, int],
    batch: Axes = (),
    precision: Precision | str,
    result: DType | None = None,
) -> jax.Array:
    """Multiplies two arrays, as `lax.dot_general` does.

    Args:
      x: any shape; rounded to `compute`.
      y: any shape; rounded to `compute`.
      contract: the axis of `x` and the axis of `y` that are summed over.
      batch: axes that both operands have in the same places.
      precision: the dtype policy.
      result: dtype of the result; None is `accumulate`. Devices add their parts of a sum in it.

    Returns:
      The batch axes, the other axes of `x`, the other axes of `y`.
    """
    precision, terms = Precision.of(precision), x.shape[contract[0]]
    if precision.sums == "fixed" and terms > ADDED:
        parts = [
            product(
                lax.slice_in_dim(x, i, min(i + ADDED, terms), axis=contract[0]),
                lax.slice_in_dim(y, i, min(i + ADDED, terms), axis=contract[1]),
                contract=contract,
                batch=batch,
                precision=precision,
            )
            for i in range(0, terms, ADDED)
        ]
        return functools.reduce(jnp.add, parts)
    free = [axis for axis in range(x.ndim) if axis != contract[0] and axis not in batch]
    rows = math.prod(x.shape[axis] for axis in free)
    length, unit = x.shape[free[-1]], row_unit(rows, precision)
    more = -length % (unit // math.gcd(rows // max(1, length), unit))
    if more:
        x = jnp.pad(x, [(0, more * (axis == free[-1])) for axis in range(x.ndim)])
    multiply = functools.partial(
        lax.dot_general,
        dimension_numbers=(((contract[0],), (contract[1],)), (batch, batch)),
        preferred_element_type=result or precision.accumulate,
    )
    dot = functools.partial(_multiplied, x.astype(precision.compute), by=multiply, as_in=precision)
    y = y.astype(precision.compute)
    last, width = y.ndim - 1, max(64, _SMALL // y.shape[contract[1]] // 64 * 64)
    if precision.sums == "fixed" and rows < 64 and contract[1] != last and width < y.shape[last]:
        starts = range(0, y.shape[last], width)
        parts = [
            dot(lax.slice_in_dim(y, i, min(i + width, y.shape[last]), axis=last)) for i in starts
        ]
        z = jnp.concatenate(parts, axis=-1)
    else:
        z = dot(y)
    return lax.slice_in_dim(z, 0, length, axis=len(batch) + len(free) - 1) if more else z


def block_product(x: jax.Array, y: jax.Array, *, contract: tuple[int, int]) -> jax.Array:
    """Multiplies two blocks of matrices inside a kernel for TPUs: f32[N, M], the sum over the axes
    `contract`. The operands are in `compute` already, and such kernels add in f32."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32)


def _multiplied(x: jax.Array, y: jax.Array, *, by: Any, as_in: Precision) -> jax.Array:
    """Multiplies in the way that `products` says. On CPU, which has no such units, f32 operands are
    cut into the parts that the units would multiply. The parts are kept in f32, which holds their
    products exactly; those of the smallest parts are added first."""
    direct = functools.partial(by, precision=as_in.algorithm)
    if as_in.algorithm is lax.Precision.HIGHEST:
        return direct(x, y)
    units, _, products = as_in.products.partition("x")
    bits, (count, last) = {"bf16": 7, "tf32": 10}[units], _PARTS[products]

    def emulated(x: jax.Array, y: jax.Array) -> jax.Array:
        left, right = _parts(x, bits, count), _parts(y, bits, count)
        places = [(i, j) for i in range(count) for j in range(count) if i + j <= last]
        exact = functools.partial(by, precision=lax.Precision.HIGHEST)
        terms = (exact(left[i], right[j]) for i, j in sorted(places, key=sum, reverse=True))
        return functools.reduce(jnp.add, terms)

    return lax.platform_dependent(x, y, cpu=emulated, default=direct)


# Products of parts -> parts of an operand, and the largest sum of two parts' numbers.
_PARTS = {"": (1, 0), "3": (2, 1), "6": (3, 2), "9": (3, 4)}


def _parts(x: jax.Array, bits: int, count: int) -> list[jax.Array]:
    found = []
    for _ in range(count):
        found.append(lax.reduce_precision(x, exponent_bits=8, mantissa_bits=bits))
        x = x - found[-1]
    return found


def row_unit(rows: int, precision: Precision) -> int:
    """Returns the unit to whose multiples a product's rows are padded. XLA on CPU sums a vector's
    product in a different order than a matrix's. A processor that multiplies bf16 in tiles (AMX)
    also has a different order for the last rows, which fill no tile."""
    fixed = precision.sums == "fixed" and precision.compute == jnp.bfloat16
    if fixed and may_multiply_bf16():
        return 16
    return 2 if rows == 1 else 1


def grouped_product(
    x: jax.Array,
    y: jax.Array,
    sizes: jax.Array,
    *,
    contract: tuple[int, int],
    group: Axes = (0,),
    precision: Precision,
    result: DType | None = None,
) -> jax.Array:
    """Multiplies consecutive groups of rows of `x`, each by its own matrix.

    Args:
      x: [M, ...]; rounded to `compute`.
      y: [G, ...], a matrix for each group; or [M, ...] if `group` is empty, and the result then has
        a matrix for each group.
      sizes: i32[G], rows in each group.
      contract: the axis of `x` and the axis of `y` that are summed over.
      group: axes of `y` that count groups.
      precision: the dtype policy.
      result: dtype of the result; None is `accumulate`, in which sums are in any case.

    Returns:
      The products; rows beyond the groups are undefined.

    Raises:
      ValueError: if `precision.products` is not exact: XLA would ignore the algorithm.
    """
    if precision.algorithm is not lax.Precision.HIGHEST:
        raise ValueError(
            f"products={precision.products} is not available for a mixture of experts; leave "
            "products out of the precision"
        )
    x, y = x.astype(precision.compute), y.astype(precision.compute)
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((contract[0],), (contract[1],)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=group,
    )
    ragged = functools.partial(
        lax.ragged_dot_general,
        ragged_dot_dimension_numbers=dimensions,
        # bf16 operands are exact in any case, and the TPU's kernel rejects the setting for them.
        precision=None if precision.compute == jnp.bfloat16 else precision.algorithm,
    )
    one_by_one = functools.partial(
        _grouped_on_cpu, contract=contract, group=group, precision=precision
    )
    settings = grouped.Settings(precision, result or precision.accumulate)
    kernel = functools.partial(grouped.by_groups, settings=settings)
    if group:
        kernel = functools.partial(grouped.by_rows, axis=contract[1], settings=settings)
    wide = functools.partial(ragged, preferred_element_type=precision.accumulate)
    others: dict[str, Any] = on_nvidia(kernel)
    if precision.compute == settings.result == jnp.bfloat16:
        # XLA's kernel for TPUs adds in f32 and rounds once; a cast would be a pass of its own.
        others["tpu"] = functools.partial(ragged, preferred_element_type=settings.result)
    return lax.platform_dependent(
        x,
        y,
        sizes,
        cpu=lambda *given: one_by_one(*given).astype(settings.result),
        **others,
        default=lambda *given: wide(*given).astype(settings.result),
    )


def _grouped_on_cpu(x, y, sizes, *, contract, group, precision):
    """Multiplies group by group and skips empty ones. XLA has no kernel for groups on CPU: it
    multiplies all rows by all matrices, and adds in an order that depends on the number of rows."""
    ends = jnp.cumsum(sizes)
    index = jnp.arange(len(x))[:, None]

    def one(start, end, matrix):
        own = jnp.where((index >= start) & (index < end), x, 0)
        if group:
            return product(own, matrix, contract=(1, contract[1] - 1), precision=precision)
        return transposed_product(own, y, precision=precision)

    def nothing(start, end, matrix):
        return jnp.zeros_like(jax.eval_shape(one, start, end, matrix))

    def step(total, scanned):
        start, end, matrix = scanned
        z = lax.cond(end > start, one, nothing, start, end, matrix)
        return (total + z, None) if group else (total, z)

    scanned = (ends - sizes, ends, y if group else None)
    shape = jax.eval_shape(one, *jax.tree.map(lambda v: v[0], scanned))
    total, stacked = lax.scan(step, jnp.zeros(shape.shape, shape.dtype), scanned)
    return total if group else jnp.asarray(stacked)


def summed_in(precision: Precision) -> DType:
    """Returns the dtype in which devices add the gradient of a matrix: `grads` if `compute` is the
    same, so that no microbatch rounds it twice, else `accumulate`."""
    narrow = precision.grads == precision.compute and precision.sums == "any"
    return precision.grads if narrow else precision.accumulate


def rounded_sum(x: jax.Array, dtype: DType) -> jax.Array:
    """Rounds a sum over devices to a dtype. XLA for TPUs would round each device's part to bf16
    instead, and add in bf16, if a cast alone followed the sum."""
    if dtype == jnp.bfloat16:
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def transposed_product(
    x: jax.Array,
    y: jax.Array,
    *,
    batch: Axes = (),
    precision: Precision,
    result: DType | None = None,
) -> jax.Array:
    """Computes `x.T @ y` for matrices behind the `batch` axes: [..., N, A] and [..., N, B] ->
    [..., A, B], in `result` as `product` does.

    On CPU, XLA has bf16 kernels for plain products of row-major arrays only. It converts other
    operands to f32, which is five times slower where there are bf16 units, or fails at run time. So
    a barrier keeps it from folding the transpose into the product, and the array behind the barrier
    is flat, or XLA would see its layout. A second barrier does the same for the result. If `x` is
    the wider operand, `y` and the result are transposed instead.
    """
    rows, result = len(batch), result or precision.accumulate
    dot = functools.partial(product, contract=(rows + 1, rows), batch=batch, precision=precision)

    def plain(x: jax.Array, y: jax.Array) -> jax.Array:
        return dot(jnp.swapaxes(x, -1, -2), y, result=result)

    def guarded(x: jax.Array, y: jax.Array) -> jax.Array:
        columns = jnp.swapaxes(x, -1, -2)
        flat = lax.optimization_barrier(columns.reshape(-1))
        return lax.optimization_barrier(dot(flat.reshape(columns.shape), y)).astype(result)

    def narrow(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.swapaxes(guarded(y, x), -1, -2)

    if precision.compute != jnp.bfloat16:
        return plain(x, y)
    x, y = x.astype(precision.compute), y.astype(precision.compute)
    wide = y.shape[-1] < x.shape[-1] <= _WIDEST
    return lax.platform_dependent(x, y, cpu=narrow if wide else guarded, default=plain)


def named(x: jax.Array, name: str) -> jax.Array:
    """Gives a result the checkpoint name `name`, in a forward rule, which is not differentiated.
    Numbers of 16 bits are kept as integers, because a scan stacks them (`half_bits`)."""
    return from_bits(checkpoint_name(to_bits(x), name), x.dtype)


def _matmul_forward(x, weight, precision, gradient):
    x, weight = x.astype(precision.compute), weight.astype(precision.compute)
    y = product(x, weight, contract=(x.ndim - 1, 1), precision=precision)
    return named(y.astype(precision.activations), OUTPUT), (x, weight)


def matmul_gradient(
    precision: Precision,
    gradient: GradientSum | None,
    operands: tuple[jax.Array, jax.Array],
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes the gradients of `matmul` to its operands, `x` as rows."""
    x, weight = operands
    dx = product(dy, weight, contract=(dy.ndim - 1, 0), precision=precision)
    by_rows = functools.partial(
        transposed_product, precision=precision, result=summed_in(precision)
    )
    if gradient is None:
        dweight = by_rows(dy, x).astype(weight.dtype)
    else:
        dweight = rounded_sum(gradient(by_rows, dy, x), weight.dtype)
    return dx.astype(precision.activations), dweight


_matmul: Any = jax.custom_vjp(lambda *args: _matmul_forward(*args)[0], nondiff_argnums=(2, 3))
_matmul.defvjp(_matmul_forward, matmul_gradient)


def matmul(
    x: jax.Array, weight: jax.Array, *, precision: Precision, gradient: GradientSum | None = None
) -> jax.Array:
    """Computes `x @ weight.T`: [..., in] and [out, in] -> [..., out], in `activations`. The
    gradient's products have this precision, too.

    `gradient` sums the gradient of `weight` over devices; `x` is then [B, T, in]. None leaves the
    sum to XLA.
    """
    x = x.astype(precision.activations)
    rows = x if gradient is not None else x.reshape(-1, x.shape[-1])
    y = _matmul(rows, weight.astype(precision.compute), precision, gradient)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _multiply(x, y, form, precision):
    rows = tuple(range(x.ndim - 2))
    if form == "tn":
        return transposed_product(x, y, batch=rows, precision=precision)
    last = x.ndim - 1
    contract = (last, last - 1 if form == "nn" else last)
    return product(x, y, contract=contract, batch=rows, precision=precision)


def _batched_forward(x, y, form, precision):
    kept = x.astype(precision.compute), y.astype(precision.compute)
    return _multiply(x, y, form, precision), kept


def _batched_backward(form, precision, residuals, dz):
    x, y = residuals
    if form == "nn":
        return _multiply(dz, y, "nt", precision), _multiply(x, dz, "tn", precision)
    if form == "nt":
        return _multiply(dz, y, "nn", precision), _multiply(dz, x, "tn", precision)
    return _multiply(y, dz, "nt", precision), _multiply(x, dz, "nn", precision)


_batched: Any = jax.custom_vjp(_multiply, nondiff_argnums=(2, 3))
_batched.defvjp(_batched_forward, _batched_backward)


def batched_matmul(
    x: jax.Array, y: jax.Array, *, form: Form = "nn", precision: Precision
) -> jax.Array:
    """Multiplies stacks of matrices whose leading dimensions are equal; the result is in
    `accumulate`. The gradient's products have this precision, too."""
    x, y = x.astype(precision.accumulate), y.astype(precision.accumulate)
    return _batched(x, y, form, precision)
