"""Casts of whole trees of parameters, gradients or moments to a role's dtype."""

from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxrl.core import blocks
from jaxrl.core.precision import DType, Precision

Tree = TypeVar("Tree")


def dtype_of(path: str, dtype: DType) -> DType:
    """Returns the dtype of a parameter where the others have `dtype`.

    It is f32 if the path ends in "_f32": a router's correction bias decides between scores that
    differ by less than neighbouring 16-bit numbers.
    """
    return jnp.dtype(jnp.float32) if path.endswith("_f32") else dtype


def cast(tree: Tree, dtype: DType) -> Tree:
    """Casts the floating-point leaves of a tree, as `dtype_of` says; leaves others as they are.

    Example:
      >>> cast({"ids": jnp.zeros(1, int), "w": jnp.zeros(1)}, jnp.dtype(jnp.bfloat16))
      {'ids': Array([0], dtype=int32), 'w': Array([0], dtype=bfloat16)}
    """

    def one(path: tuple[object, ...], x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x.astype(dtype_of(str(getattr(path[-1], "key", "")) if path else "", dtype))

    return jax.tree.map_with_path(one, tree)


def as_served(params: Tree, precision: Precision | str) -> Tree:
    """Rounds parameters as a publish does: to `wire`, then to the `sampler`'s dtype, then to the
    `blocks`."""
    precision = Precision.of(precision)

    def held(x: jax.Array, wire: jax.Array) -> jax.Array:
        # The barrier keeps XLA from leaving out a rounding that the second cast seems to undo, and
        # JAX from returning an array that it was given. It makes a copy, which one cast can spare.
        once = wire.dtype != x.dtype and precision.sampler == precision.wire
        return wire if once else jax.lax.optimization_barrier(wire)

    wire = jax.tree.map(held, params, cast(params, precision.wire))
    served = cast(wire, precision.sampler)
    if precision.blocks != "e4m3":
        return served

    def one(path: tuple[object, ...], x: jax.Array) -> jax.Array:
        return blocks.matrix(x, str(getattr(path[-1], "key", "")), precision)

    return jax.tree.map_with_path(one, served)
