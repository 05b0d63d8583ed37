"""Transposes that matrix products can use on every backend."""

import functools

import jax
import jax.numpy as jnp
from jax import lax


def transposed(x: jax.Array) -> jax.Array:
    """[..., M, N] -> [..., N, M], as the first operand of a product.

    XLA on CPU has kernels with bf16 operands for plain products only. There their transpose is kept
    from being folded into the product, which would be slow, or, on a processor without bf16
    instructions, fail at run time.
    """
    swap = functools.partial(jnp.swapaxes, axis1=-1, axis2=-2)
    if x.dtype != jnp.bfloat16:
        return swap(x)
    return lax.platform_dependent(x, cpu=lambda x: lax.optimization_barrier(swap(x)), default=swap)
