"""Half-precision arrays as integers while they are only moved.

XLA on CPU slices and updates bf16 arrays by way of f32: updating one slot of a cache would convert
the whole cache twice. Integers are moved as they are, and on every backend the change of type is
free.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.core.precision import DType


def to_bits(x: jax.Array) -> jax.Array:
    """bf16 and f16 as u16 of the same bits and shape; other arrays as they are."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def from_bits(x: jax.Array, dtype: DType) -> jax.Array:
    """The inverse of `to_bits`."""
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x
