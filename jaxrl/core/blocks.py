"""Numbers of 8 bits that share factors: the operands of `blocks=e4m3`.

A block of a matrix, 128 x 128, and a block of a row of activations, 1 x 128, have a factor of their
own, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3). Here a factor is a power of two, as in
DeepSeek-V3.1 and the OCP's MX formats: the smallest by which the block's largest number is at most
448, E4M3's largest. A number times its factor is then exact in bf16 and in f32, so rounded operands
are arrays of these dtypes, and a product of two of them is that of E4M3 numbers with f32 sums.

Gradients pass a rounding unchanged ("straight through", arXiv:1308.3432).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.core.precision import Precision

BLOCK = 128
"""Rows and columns of a block of a matrix, and numbers of a block of a row."""

MATRICES = frozenset(
    {
        *("q", "k", "v", "o", "qkv", "q_down", "q_up", "kv_down", "kv_up"),
        *("gate", "up", "gate_up", "down", "shared_gate", "shared_up", "shared_down"),
        *("expert_gate", "expert_up", "expert_gate_up", "expert_down"),
        *("qkvz", "linear_qkv", "linear_z", "linear_o"),
    }
)
"""Names of the matrices in 8 bits: projections and feed-forward networks. Embedding, head, norms,
routers, the gates of the delta rule and of shared experts, and adapters have none."""

# Exponents of factors: their smallest numbers, 2^-9 of them, are normal in bf16 and f32, and the
# largest number of f32 has one.
_LEAST, _MOST = -100, 120
_BIAS = 127  # of f32's exponents


def operand(x: jax.Array, name: str, precision: Precision) -> jax.Array:
    """Rounds the activations [..., in] that the matrix `name` of a layer multiplies, if the dtype
    policy has them in blocks of 8 bits."""
    return round_rows(x) if precision.blocks in ("e4m3", "rows") and name in MATRICES else x


def matrix(weight: jax.Array, name: str, precision: Precision) -> jax.Array:
    """Rounds the matrix `name` of a layer [..., out, in], if the dtype policy has it in blocks of 8
    bits."""
    return round_matrix(weight) if precision.blocks == "e4m3" and name in MATRICES else weight


def _straight_through(function: Any) -> Any:
    rounded = jax.custom_vjp(function)
    rounded.defvjp(lambda x: (function(x), None), lambda _, dy: (dy,))
    return functools.wraps(function)(rounded)


@_straight_through
def round_rows(x: jax.Array) -> jax.Array:
    """Rounds each block of 128 numbers of the last axis to E4M3 times its factor. Infinities and
    NaNs stay; those of the gradient pass."""
    return _rounded(x, (BLOCK,))


@_straight_through
def round_matrix(weight: jax.Array) -> jax.Array:
    """Rounds each block of 128 x 128 numbers of the last two axes to E4M3 times its factor, as
    `round_rows`. Rounding again changes nothing."""
    return _rounded(weight, (BLOCK, BLOCK))


def _rounded(x: jax.Array, block: tuple[int, ...]) -> jax.Array:
    parts = divide(x.astype(jnp.float32), block)
    exponents = factor_exponents(parts, axes=tuple(range(1 - 2 * len(block), 1, 2)))
    # Steps of E4M3: 3 bits behind a number's first one, and never below 2^-9 of the factor.
    own = jnp.maximum(_exponent(parts), exponents - 6) - 3
    found = jnp.round(parts * _power(-own)) * _power(own)
    return join(found, x.shape, block).astype(x.dtype)


def numbers_and_factors(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Divides a matrix [out, in] into E4M3 numbers f8[out, in] and the factors of their blocks,
    f32[ceil(out / 128), ceil(in / 128)]. Their products are `round_matrix` of it."""
    parts = divide(weight.astype(jnp.float32), (BLOCK, BLOCK))
    exponents = factor_exponents(parts, axes=(-3, -1))
    numbers = join(parts * _power(-exponents), weight.shape, (BLOCK, BLOCK))
    return numbers.astype(jnp.float8_e4m3fn), _power(exponents[..., :, 0, :, 0])


def divide(x: jax.Array, block: tuple[int, ...]) -> jax.Array:
    """Divides the last axes of an array into blocks: [..., N] -> [..., ceil(N / 128), 128]. The
    last block is filled with zeros; an axis shorter than a block is one block as it is."""
    first = x.ndim - len(block)
    more, shape = [(0, 0)] * x.ndim, list(x.shape[:first])
    for axis, size in enumerate(block, first):
        size = min(size, max(1, x.shape[axis]))
        more[axis] = (0, -x.shape[axis] % size)
        shape += [-(-x.shape[axis] // size), size]
    return (jnp.pad(x, more) if any(n for _, n in more) else x).reshape(shape)


def join(parts: jax.Array, shape: tuple[int, ...], block: tuple[int, ...]) -> jax.Array:
    """Inverts `divide` for an array of this shape."""
    first = len(shape) - len(block)
    whole = [parts.shape[i] * parts.shape[i + 1] for i in range(first, parts.ndim, 2)]
    return parts.reshape(*shape[:first], *whole)[tuple(slice(n) for n in shape)]


def factor_exponents(parts: jax.Array, *, axes: tuple[int, ...]) -> jax.Array:
    """Computes the exponents of the factors of blocks f32[...], whose numbers lie along `axes`:
    i32[...], these axes kept with size 1. A block of zeros has the smallest factor."""
    largest = jnp.max(jnp.abs(parts), axis=axes, keepdims=True)
    # 448 = 1.75 * 2^8: a largest number of more than 1.75 * 2^n needs the next power.
    bits = jax.lax.bitcast_convert_type(largest, jnp.uint32) + jnp.uint32(0x1FFFFF)
    return jnp.clip((bits >> 23).astype(jnp.int32) - _BIAS - 8, _LEAST, _MOST)


def _exponent(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return ((bits >> 23) & 0xFF).astype(jnp.int32) - _BIAS


def _power(exponent: jax.Array) -> jax.Array:
    """Returns 2^exponent in f32, for normal results."""
    bits = (exponent + _BIAS).astype(jnp.uint32) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
