"""Products of int8 operands: `blocks=int8`.

Every row of a matrix, and every token's row of activations, has a factor of its own, its largest
number over 127. That is W8A8 of compressed-tensors, with dynamic activations, as vLLM serves it on
CPUs. Sums are exact integers, whatever their order.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.core.precision import Precision
from jaxrl.models.products import OUTPUT, matmul_gradient, named, product
from jaxrl.sharding.gradients import GradientSum

_LARGEST = 127
_TERMS = 2**24 // _LARGEST**2  # of these products f32 holds every sum, in any order


def quantise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds rows [..., in] to the nearest of 255 multiples of their factors, ties to even.

    Returns:
      The integers i8[..., in] and the factors f32[..., 1]. A row of zeros has the factor 0.
    """
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    # XLA would multiply by 1 / 127, and make one division of two: both round differently.
    factors = lax.optimization_barrier(largest / (_LARGEST + 0 * largest))
    # vLLM multiplies by the inverse.
    inverse = jnp.where(factors > 0, 1 / factors, 0)
    return jnp.round(wide * inverse).astype(jnp.int8), factors


def integer_product(x: jax.Array, y: jax.Array, *, precision: Precision) -> jax.Array:
    """Multiplies integers i8[..., in] and i8[out, in]: i32[..., out], exact. Every dtype that
    `compute` may be holds them."""
    total = jnp.zeros((*x.shape[:-1], y.shape[0]), jnp.int32)
    for i in range(0, x.shape[-1], _TERMS):
        left, right = x[..., i : i + _TERMS], y[:, i : i + _TERMS]
        total += product(left, right, contract=(x.ndim - 1, 1), precision=precision).astype(
            jnp.int32
        )
    return total


def _forward(x, weight, precision, gradient):
    rows, factors = quantise(x)
    matrix, scales = quantise(weight)
    sums = integer_product(rows, matrix, precision=precision).astype(jnp.float32)
    y = sums * scales.reshape((1,) * (x.ndim - 1) + (-1,)) * factors
    return named(y.astype(precision.activations), OUTPUT), (x, weight)


def _rounded(x: jax.Array) -> jax.Array:
    integers, factors = quantise(x)
    return (integers.astype(jnp.float32) * factors).astype(x.dtype)


def _backward(precision, gradient, operands, dy):
    x, weight = map(_rounded, operands)
    return matmul_gradient(precision, gradient, (x, weight), dy)


_matmul: Any = jax.custom_vjp(lambda *args: _forward(*args)[0], nondiff_argnums=(2, 3))
_matmul.defvjp(_forward, _backward)


def int8_matmul(
    x: jax.Array, weight: jax.Array, *, precision: Precision, gradient: GradientSum | None = None
) -> jax.Array:
    """Computes `products.matmul` of operands that are rounded to int8 by rows. Gradients pass the
    roundings: they are those of the rounded operands' product (arXiv:1308.3432)."""
    x = x.astype(precision.activations)
    rows = x if gradient is not None else x.reshape(-1, x.shape[-1])
    y = _matmul(rows, weight.astype(precision.compute), precision, gradient)
    return y.reshape(*x.shape[:-1], weight.shape[0])
