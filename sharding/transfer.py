"""Transfers between host memory and devices, which may belong to several processes."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding


def place(tree: Any, shardings: Any) -> Any:
    """Moves host arrays, equal on every process, to devices. Each process places its own parts;
    nothing is sent. Arrays that lie on the devices of several processes move between them.
    `shardings` is one sharding for all arrays, or a tree of the same form."""
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    if isinstance(shardings, Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)
    return jax.tree.map(_place, tree, shardings)


def placed(shapes: Any, shardings: Any) -> Any:
    """Adds shardings to a tree of shapes or arrays, for compiling a program ahead of time."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def fetch(tree: Any) -> Any:
    """Fetches whole arrays to host memory. With several processes all must call it."""
    if jax.process_count() > 1:
        tree = jax.tree.map(_whole, tree)
    return jax.device_get(tree)


def _place(x: Any, sharding: Sharding) -> jax.Array:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    # jax.device_put would send the values between processes to compare them.
    host = jax.device_get(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _whole(x: Any) -> Any:
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return x
    assert isinstance(x.sharding, NamedSharding)
    return jax.jit(_same, out_shardings=NamedSharding(x.sharding.mesh, PartitionSpec()))(x)


def _same(x: jax.Array) -> jax.Array:
    return x
