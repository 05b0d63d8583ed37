"""Digests of arrays, computed where the arrays are."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.core.compiled import jit


def digest(x: jax.Array, strides: tuple[int, ...]) -> jax.Array:
    """Computes u32[2] from the bits of all numbers and from their positions.

    The position of a number is the sum of its indices times `strides`, so that an array and its
    transposition have the same digest if the strides are transposed too. Sums wrap around, so the
    digest does not depend on the way an array is divided over devices.
    """
    word = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, word).astype(jnp.uint32)
    position = jnp.zeros(x.shape, jnp.uint32)
    for axis, stride in enumerate(strides):
        position += lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)
    mixed = [_mix(bits ^ _mix(position + jnp.uint32(seed))) for seed in (1, 0x9E3779B9)]
    return jnp.stack([jnp.sum(one, dtype=jnp.uint32) for one in mixed])


def _mix(x: jax.Array) -> jax.Array:
    """Mixes the bits of 32-bit words (MurmurHash3's last step)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


@functools.cache
def digester(strides: tuple[int, ...]) -> Any:
    """Returns the compiled `digest`."""
    return jit(functools.partial(digest, strides=strides))
