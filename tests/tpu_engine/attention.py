"""Attention over pages in plain jax, with the arguments and the cache of the engine's kernel."""

from typing import Any

import jax
import jax.numpy as jnp


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: jax.Array,
    lengths: jax.Array,
    pages: jax.Array,
    starts: jax.Array,
    distribution: jax.Array,
    *,
    sm_scale: float = 1.0,
    **_: Any,
) -> tuple[jax.Array, jax.Array]:
    """Computes attention of new tokens and writes their keys and values into the cache.

    `q` is [T, N, H], `k` and `v` are [T, K, H], for the new tokens of all S sequences, whose first
    tokens `starts` [S + 1] names. `lengths` [S] count old and new tokens, and `pages` [S * P] name
    the pages of each sequence. `distribution`'s last entry is the number of sequences.
    """
    tokens, heads, width = q.shape
    kv_heads, sequences, size = k.shape[1], lengths.shape[0], cache.shape[1]
    per = pages.shape[0] // sequences
    token = jnp.arange(tokens)
    row = jnp.minimum(jnp.searchsorted(starts[1:], token, side="right"), sequences - 1)
    valid = token < starts[distribution[2]]
    position = lengths[row] - (starts[row + 1] - starts[row]) + (token - starts[row])
    page = pages[jnp.clip(row * per + position // size, 0, sequences * per - 1)]
    slots = cache.reshape(-1, *cache.shape[2:])
    new = jnp.stack([k, v], 2).reshape(tokens, *cache.shape[2:]).astype(cache.dtype)
    slot = jnp.where(valid, page * size + position % size, slots.shape[0])
    slots = slots.at[slot].set(new, mode="drop")
    held = slots.reshape(cache.shape)[pages.reshape(sequences, per)[row]]
    held = held.reshape(tokens, per * size, kv_heads, 2, width)
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum(
        "tkgh,tjkh->tkgj", grouped, held[..., 0, :], preferred_element_type=jnp.float32
    )
    seen = jnp.arange(per * size)[None] <= position[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores * sm_scale, -1e30), -1)
    out = jnp.einsum("tkgj,tjkh->tkgh", weights.astype(held.dtype), held[..., 1, :])
    out = jnp.where(valid[:, None, None], out.reshape(tokens, heads, width), 0)
    return out.astype(q.dtype), slots.reshape(cache.shape)
