"""The tokens that truncated sampling kept, in 32 bytes for each sampled token.

A learner that normalises over them computes the distribution that the sampler drew from (DeepSeek
V3.2's "keep sampling mask", arXiv:2512.02556, section 3.1).
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

RECORD = 32
"""Bytes of a record."""


def most_kept(vocab_size: int) -> int:
    """Returns the most tokens that a record can name: 14 of 152,000, all of at most 42.

    Example:
      >>> most_kept(151_936), most_kept(65_536), most_kept(30)
      (14, 16, 30)
    """
    return min(8 * RECORD // _bits(vocab_size), vocab_size)


def encode(ids: Any, vocab_size: int) -> Any:
    """Writes token ids i32[..., `most_kept(vocab_size)`] as records u8[..., 32].

    Ids may repeat: a smaller set names one of its tokens several times. Takes an array of numpy or
    of JAX and returns the same.
    """
    xp = ids.__array_namespace__()
    bits = (ids[..., None] >> _places(_bits(vocab_size), ids.ndim)) & 1
    bits = bits.reshape(*ids.shape[:-1], -1)
    missing = 8 * RECORD - bits.shape[-1]
    bits = xp.pad(bits, [(0, 0)] * (ids.ndim - 1) + [(0, missing)])
    octets = bits.reshape(*ids.shape[:-1], RECORD, 8)
    return xp.sum(octets << _places(8, ids.ndim), axis=-1).astype(np.uint8)


def decode(records: jax.Array, vocab_size: int) -> jax.Array:
    """Inverts `encode`: u8[..., 32] -> i32[..., `most_kept(vocab_size)`]."""
    bits = (records[..., None].astype(jnp.int32) >> _places(8, records.ndim)) & 1
    bits = bits.reshape(*records.shape[:-1], -1)
    size, count = _bits(vocab_size), most_kept(vocab_size)
    ids = bits[..., : size * count].reshape(*records.shape[:-1], count, size)
    return jnp.sum(ids << _places(size, records.ndim), axis=-1)


def among(ids: jax.Array, columns: jax.Array) -> jax.Array:
    """Tells which of the tokens `columns`, i32[V], are in each row's set i32[..., K]:
    bool[..., V]."""
    # Comparisons fuse, and divide over devices that hold parts of a vocabulary; a scatter does not.
    columns = columns.reshape((1,) * (ids.ndim - 1) + columns.shape)
    one_by_one = (ids[..., k, None] == columns for k in range(ids.shape[-1]))
    return functools.reduce(operator.or_, one_by_one)


class Kept(NamedTuple):
    """The sets that a batch's tokens were drawn from."""

    records: jax.Array  # u8[B, T, 32]
    drawn: jax.Array  # bool[B, T]; the other tokens are scored over the whole vocabulary


def _places(count: int, axes: int) -> np.ndarray:
    """Returns 0, 1, ... along the last axis, after `axes` others."""
    return np.arange(count, dtype=np.int32).reshape((1,) * axes + (count,))


def _bits(vocab_size: int) -> int:
    return max(1, (vocab_size - 1).bit_length())
