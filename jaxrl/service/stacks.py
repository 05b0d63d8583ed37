"""States of one shape, stacked [slots, ...]: programs that read and write slots."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.core import jit_forward


@functools.partial(jit_forward, donate_argnums=0)
def put(stack: Any, one: Any, slot: int) -> Any:
    """Writes one state into a slot."""
    return jax.tree.map(lambda x, y: x.at[slot].set(y.astype(x.dtype)), stack, one)


@jit_forward
def join(stack: Any, more: Any) -> Any:
    """Appends empty slots."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), stack, more)


@jit_forward
def take(stack: Any, slot: int) -> Any:
    """Reads the state of a slot."""
    return jax.tree.map(lambda x: x[slot], stack)


@jit_forward
def gather(stack: Any, slots: jax.Array) -> Any:
    """Reads several slots; one that does not exist reads any."""
    return jax.tree.map(lambda x: x.at[slots].get(mode="clip"), stack)


@functools.partial(jit_forward, donate_argnums=0)
def add(sums: Any, new: Any, slots: jax.Array) -> Any:
    """Adds to several slots; one that does not exist is left out."""
    return jax.tree.map(lambda x, y: x.at[slots].add(y, mode="drop"), sums, new)
