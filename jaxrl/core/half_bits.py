"""Arrays as integers of the same bits: of half precision for code that only moves them, and any
where the compiler must not look behind a rounding.

XLA on CPU slices and updates bf16 arrays by way of f32: updating one slot of a cache would convert
the whole cache twice. Integers are not converted, and the bitcast is free on every backend.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.core.precision import DType


def to_bits(x: jax.Array) -> jax.Array:
    """Returns bf16 and f16 arrays as u16 of the same bits and shape, other arrays unchanged."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def from_bits(x: jax.Array, dtype: DType) -> jax.Array:
    """Inverts `to_bits` for an array of `dtype`."""
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


@jax.custom_jvp
def with_its_bits(x: jax.Array) -> jax.Array:
    """Returns the same array of floats. XLA on CPU may compute on with what a number was before it
    was rounded, if both are in one loop: it adds a product by a fused multiply-add in one program
    and not in another. What reads this result gets the rounded numbers."""
    bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    # 0, or 1 in NaN, which stays NaN: the compiler has to look at the bits.
    found = lax.bitcast_convert_type(x, bits) | (x != x).astype(bits)
    return lax.bitcast_convert_type(found, x.dtype)


@with_its_bits.defjvp
def _(primals, tangents):
    return with_its_bits(*primals), *tangents
