"""Scored tokens, compacted to the front of each row, so that others cost nothing."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.core.kept import Kept, decode
from jaxrl.core.precision import DType


class Allowed(NamedTuple):
    """The tokens that scores are normalised over."""

    ids: jax.Array  # i32[..., K], may repeat
    whole: jax.Array  # bool[...], true for the whole vocabulary instead


class Slots(NamedTuple):
    """Slot s of a row holds its s-th scored token."""

    entry: jax.Array  # i32[B, S], index of the slot's token in its row; 0 after the last one
    target: jax.Array  # i32[B, S], the token
    count: jax.Array  # i32[B], slots in use
    trips: jax.Array  # i32[], chunks until the fullest row is done
    slot: jax.Array  # i32[B, T], the inverse of `entry`
    scored: jax.Array  # bool[B, T]
    allowed: Allowed | None  # [B, S, ...]; None for the whole vocabulary everywhere


class SlotChunk(NamedTuple):
    """Some slots of every row, N in all."""

    hidden: jax.Array  # [N, D]
    target: jax.Array  # i32[N]
    allowed: Allowed | None  # [N, ...]


def predicted(mask: jax.Array) -> jax.Array:
    """Leaves the first token of each row out of a mask [B, T]: no token predicts it."""
    # Not by `mask.at[:, 0].set(False)`, which XLA computes wrongly of a constant mask where tokens
    # are cut over devices (docs/internals/xla.md).
    return mask.astype(bool) & (jnp.arange(mask.shape[1]) > 0)[None, :]


def make_slots(
    tokens: jax.Array, scored: jax.Array, *, positions: int, kept: Kept | None, vocab_size: int
) -> Slots:
    """Compacts the tokens i32[B, T] in bool[B, T] `scored`; rows have a multiple of `positions`
    slots."""
    # Per row, so that nothing moves between devices that hold different rows.
    count = jnp.sum(scored, axis=1, dtype=jnp.int32)
    padding = -tokens.shape[1] % positions
    entry = jnp.pad(jnp.argsort(~scored, axis=1, stable=True), ((0, 0), (0, padding)))
    allowed = None
    if kept is not None:
        records = jnp.take_along_axis(kept.records, entry[:, :, None], axis=1)
        whole = ~jnp.take_along_axis(kept.drawn, entry, axis=1)
        allowed = Allowed(decode(records, vocab_size), whole)
    return Slots(
        entry=entry.astype(jnp.int32),
        target=jnp.take_along_axis(tokens, entry, axis=1),
        count=count,
        trips=-(-jnp.max(count) // positions),
        slot=jnp.maximum(jnp.cumsum(scored, axis=1, dtype=jnp.int32) - 1, 0),
        scored=scored,
        allowed=allowed,
    )


def take(values: jax.Array, i: jax.Array, *, size: int) -> jax.Array:
    """Returns chunk i of [B, S, ...]: [B, size, ...]."""
    return lax.dynamic_slice_in_dim(values, i * size, size, axis=1)


def put(array: jax.Array, values: jax.Array, i: jax.Array) -> jax.Array:
    """Writes [B * size, ...] to chunk i of [B, S, ...]."""
    size = len(values) // len(array)
    values = values.astype(array.dtype).reshape(len(array), size, *array.shape[2:])
    return lax.dynamic_update_slice_in_dim(array, values, i * size, axis=1)


def chunk_of(
    hidden: jax.Array, slots: Slots, i: jax.Array, *, size: int, behind: int, dtype: DType
) -> SlotChunk:
    """Gathers chunk i of `size` slots a row, with the hidden states in `dtype` that score them: in
    [B, T, D] they are `behind` their tokens."""
    at = jnp.maximum(take(slots.entry, i, size=size) - behind, 0)
    used = i * size + jnp.arange(size)[None, :] < slots.count[:, None]
    h = jnp.take_along_axis(hidden, at[:, :, None], axis=1).astype(dtype)
    # An unused slot reads a position outside the mask, which may hold any value.
    h = jnp.where(used[:, :, None], h, 0)

    def here(x: jax.Array) -> jax.Array:
        return take(x, i, size=size).reshape(len(hidden) * size, *x.shape[2:])

    return SlotChunk(
        h.reshape(-1, hidden.shape[2]), here(slots.target), jax.tree.map(here, slots.allowed)
    )
