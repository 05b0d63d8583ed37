"""Transposes as operands of matrix products, on every backend."""

import functools

import jax
import jax.numpy as jnp
from jax import lax


def transposed(x: jax.Array) -> jax.Array:
    """Transposes [..., M, N] -> [..., N, M], for the first operand of a product.

    On CPU, XLA has bf16 kernels for plain products only. If it folded the transpose into the
    product, that would be slow, or fail at run time on a processor without bf16 instructions. A
    barrier prevents the folding.
    """
    swap = functools.partial(jnp.swapaxes, axis1=-1, axis2=-2)
    if x.dtype != jnp.bfloat16:
        return swap(x)
    return lax.platform_dependent(x, cpu=lambda x: lax.optimization_barrier(swap(x)), default=swap)
