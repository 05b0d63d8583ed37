"""States of one shape, stacked [slots, ...]: programs that read and write slots."""

import functools
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import jit_forward
from jaxrl.sharding import fetch

_LARGE = 1 << 26  # bytes of an array above which no device has a copy of the whole one


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


def to_host(tree: Any, *, keep: bool) -> Any:
    """Fetches arrays one by one, and large ones by their first axis, so that no device gets much
    more than its part. All processes must call it; without `keep` the result has no values."""

    def one(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.ndim < 2 or x.nbytes < _LARGE:
            return fetch(x)
        parts = (fetch(take(x, i)) for i in range(x.shape[0]))
        if keep:
            return np.stack(list(parts))
        deque(parts, maxlen=0)
        return None

    return jax.tree.map(one, tree)
