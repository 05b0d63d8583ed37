"""Digests of arrays, independent of sharding, so that a checkpoint can be checked on any mesh.

A digest is two sums over all elements, modulo 2^32, of numbers mixed from an element's bits and its
index. Integer sums do not depend on order, so each device adds up its own elements. Any change of
one element changes the first sum; other damage, such as swapped elements, is missed with
probability 2^-64. Large arrays are summed in place, by one compiled program per shape and sharding.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core.compiled import jit_forward
from jaxrl.core.hosts import Hosts

_OWN = "blake2b"  # key of the digest of the JSON itself
_SMALL = 2**16  # elements, summed by numpy: compiling takes longer
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def tree_digests(tree: Any) -> dict[str, str]:
    """Returns the digest of each array of a tree, {"params/layers/q": "8c0f63b1d2a45e77", ...}.

    Every process of a run must call it with its part of the same arrays. All get the same digests,
    unless replicas of an array differ.
    """
    leaves = named_leaves(tree).items()
    sums = {name: _local(x) if _is_small(x) else _on_devices(x) for name, x in leaves}
    return {
        name: "".join(f"{int(part):08x}" for part in np.asarray(pair))
        for name, pair in sums.items()
    }


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree, {"params/layers/q": ..., ...}, in its order."""
    found = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in found}


def _is_small(x: jax.Array) -> bool:
    return x.size <= _SMALL and (x.is_fully_addressable or x.is_fully_replicated)


def _local(x: jax.Array) -> np.ndarray:
    found = np.asarray(x)
    return _sums(found.view(_WORDS[found.dtype.itemsize]).astype(np.uint32), np)


@jit_forward
def _on_devices(x: jax.Array) -> jax.Array:
    near = jax.device_put(x, jax.memory.Space.Device)  # moments may lie in the host's memory
    if near.dtype == jnp.bool_:
        near = near.astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(near, _WORDS[near.dtype.itemsize])
    return _sums(words.astype(jnp.uint32), jnp)


def _sums(words: Any, xp: Any) -> Any:
    """Returns u32[2] for words u32[...], with the array functions of numpy or of jax.numpy."""
    words = words.reshape(words.shape or (1,))  # numpy warns of scalars that overflow
    index = xp.zeros([1] * words.ndim, np.uint32)
    for axis, size in enumerate(words.shape):
        stride = np.uint32(math.prod(words.shape[axis + 1 :]) % 2**32)
        places = xp.arange(size, dtype=np.uint32) * stride
        index = index + places.reshape([-1 if i == axis else 1 for i in range(words.ndim)])
    salt = _mix(index)
    mixed = _mix(words ^ salt)
    sums = [xp.sum(part, dtype=np.uint32) for part in (mixed, mixed * (salt | np.uint32(1)))]
    return xp.stack(sums)


def _mix(x: Any) -> Any:
    """Permutes 32-bit words so that each bit of the result depends on every bit of the input."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


class DamagedError(ValueError):
    """Content that differs from the saved one."""


def seal(host: Mapping[str, Any], trees: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the JSON of a checkpoint: the host's state, the digests of all arrays, and a digest
    of both. Every process must call it, as `tree_digests`."""
    arrays = {item: tree_digests(tree) for item, tree in trees.items()}
    content = {"host": json.loads(json.dumps(host)), "arrays": arrays}
    return content | {_OWN: _digest(content)}


def unseal(sealed: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """Inverts `seal`: returns the host's state and {item: {array: digest}}.

    Raises:
      DamagedError: if the JSON differs from the saved one.
    """
    if not isinstance(sealed, dict):
        raise DamagedError(f"host/metadata holds {type(sealed).__name__}, expected an object")
    content = {name: value for name, value in sealed.items() if name != _OWN}
    if sealed.get(_OWN) != _digest(content):
        raise DamagedError("host/metadata is not what was saved")
    return content["host"], content["arrays"]


def first_damaged(tree: Any, saved: Mapping[str, str]) -> str | None:
    """Returns the name of the first array that differs from the saved one, or None. Every process
    must call it; all return the same."""
    found = tree_digests(tree)
    damaged = [number for number, name in enumerate(found, 1) if found[name] != saved.get(name)]
    first = -Hosts().largest(-damaged[0] if damaged else -len(found) - 1)
    return list(found)[first - 1] if first <= len(found) else None


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
