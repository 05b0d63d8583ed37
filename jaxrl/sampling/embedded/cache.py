"""The KV cache: its arrays, their reading by attention and their writing."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxrl.core.gpu_kernels import on_nvidia
from jaxrl.core.half_bits import from_bits, to_bits
from jaxrl.core.precision import Precision
from jaxrl.core.processor import product_unit
from jaxrl.models.attention.blocks import TILE, pad_values, softmax_product
from jaxrl.models.attention.scores import Scoring
from jaxrl.models.layers import LayerContext
from jaxrl.models.linear_attention import LinearState
from jaxrl.models.products import ADDED, product, row_unit
from jaxrl.sampling.embedded import cache_kernel

_TERMS = 32  # of bf16 that a tile adds


@struct.dataclass
class Cache:
    """Keys and values of L layers, B rows and S slots, in the form of `to_bits`, the states of N
    linear layers, and optionally the experts that each layer chose.

    Keys are stored transposed for a CPU: XLA runs the products of a decode step fastest there if
    they do not contract the cache's last dimension. For a TPU XLA moves the dimensions that are
    written together to the end, and would copy a transposed cache to write a token.
    """

    # [L, B, K, head_dim, S] for a CPU, else [L, B, K, S, head_dim]. In the absorbed form of
    # `latent`, K is 1.
    keys: jax.Array
    # [L, B, K, S, value_dim], see `pad_values`, or [L, B, K / J, S, TILE] with `_joined_heads` J;
    # None in the absorbed form, where they are the keys.
    values: jax.Array | None
    # [L, B, S, k] of the layers with experts, in the smallest unsigned dtype.
    experts: jax.Array | None = None
    linear: LinearState | None = None  # its arrays have the layers in front: [N, B, ...]
    for_cpu: bool = struct.field(pytree_node=False, default=True)

    @property
    def rows(self) -> int:
        """The number of rows B."""
        return self.keys.shape[1]

    @property
    def slots(self) -> int:
        """The number of tokens S that fit in a row."""
        return self.keys.shape[-1 if self.for_cpu else -2]


def attend_cache(
    q: jax.Array,
    cache: Cache,
    place: jax.Array,
    *,
    positions: jax.Array,
    scoring: Scoring,
    context: LayerContext,
) -> jax.Array:
    """Computes grouped-query attention of T tokens per row over the row's cache, with the
    arithmetic of `attention`. Slots hidden by the window are not read. A single token of each row
    has a kernel on an NVIDIA GPU.

    Args:
      q: [B, T, H, hd].
      cache: holds the tokens up to `positions`.
      place: i32[], index of the layer in the cache.
      positions: i32[B, T], consecutive in each row; results at padding are arbitrary.
      scoring: the window, scale, cap and sinks of the scores.
      context: its precision has scores and softmax in `accumulate`.

    Returns:
      [B, T, H, vd] in `precision.activations`.
    """
    own: Any = {"scoring": scoring, "precision": context.precision}
    plain = functools.partial(_attend_plain, **own)
    alone = q.shape[1] == 1 and cache.values is not None and not cache.for_cpu
    if not alone or not cache_kernel.computes(context.precision):
        return plain(q, cache, place, positions)

    def kernel(q, cache, place, positions):
        held = cache.keys, cache.values
        return cache_kernel.attend(q, *held, place, positions, **own, local=context.local)

    return lax.platform_dependent(q, cache, place, positions, **on_nvidia(kernel), default=plain)


def _attend_plain(q, cache, place, positions, *, scoring, precision):
    batch, length, heads, dim = q.shape
    kv_heads, window = cache.keys.shape[2], scoring.window
    groups = heads // kv_heads
    first, keys, values = _near_slots(cache, place, positions, window, precision=precision)
    index = first[:, None, None] + jnp.arange(values.shape[2], dtype=jnp.int32)[None, None, :]
    seen = index <= positions[:, :, None]
    if window is not None:
        seen &= index > positions[:, :, None] - window
    q = q.reshape(batch, length, kv_heads, groups, dim).transpose(0, 2, 3, 1, 4)
    # The queries of all tokens and heads that share keys are rows of one matrix.
    q = q.reshape(batch, kv_heads, groups * length, dim)
    if cache.for_cpu:
        q, keys = _side_by_side(q, keys, precision)
    contract = (3, 2 if cache.for_cpu else 3)
    scores = product(q, keys, contract=contract, batch=(0, 1), precision=precision)
    scores = scoring.scores(scores.reshape(batch, kv_heads, groups * length, -1))
    seen = jnp.broadcast_to(seen[:, None, None], (batch, 1, groups, *seen.shape[1:]))
    seen = seen.reshape(batch, 1, groups * length, -1)
    scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
    sinks = scoring.sink_scores(kv_heads=kv_heads, ndim=4, dtype=precision.accumulate)
    if sinks is not None:
        sinks = jnp.repeat(sinks, length, axis=2)
    if (joined := kv_heads // values.shape[1]) > 1:
        scores = scores.reshape(batch, values.shape[1], -1, scores.shape[-1])
        if sinks is not None:
            sinks = sinks.reshape(len(sinks), values.shape[1], -1, 1)
    out, _ = softmax_product(scores, values, sinks, precision=precision)
    if joined > 1:  # a head keeps the columns of its own values
        out = out.reshape(batch, -1, joined, groups * length, joined, TILE // joined)
        out = jnp.stack([out[:, :, i, :, i] for i in range(joined)], axis=2)
    out = out.reshape(batch, kv_heads, groups, length, -1).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, length, heads, -1)


def _side_by_side(
    q: jax.Array, keys: jax.Array, precision: Precision
) -> tuple[jax.Array, jax.Array]:
    """Lets key heads share a product of tiles (AMX) whose rows would be padded otherwise: queries
    [B, K, Q, hd] become [B, K / J, J Q, J hd], 0 at the keys of other heads. Each head fills whole
    tiles of 32 terms, so that the others add exactly 0 to its scores. Keys [B, K, hd, S] are
    [B, K / J, J hd, S] without a copy."""
    batch, heads, rows, dim = q.shape
    fit = min(row_unit(rows, precision) // rows, ADDED // dim)
    joined = max(j for j in range(1, max(1, fit) + 1) if heads % j == 0)
    if joined == 1 or dim % _TERMS or product_unit() != "amx_bf16":
        return q, keys
    own = jnp.eye(joined, dtype=q.dtype).reshape(1, 1, joined, 1, joined, 1)
    q = q.reshape(batch, heads // joined, joined, rows, 1, dim) * own
    return (
        q.reshape(batch, heads // joined, joined * rows, joined * dim),
        keys.reshape(batch, heads // joined, joined * dim, -1),
    )


def _near_slots(
    cache: Cache,
    place: jax.Array,
    positions: jax.Array,
    window: int | None,
    *,
    precision: Precision,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Reads the slots of a layer that the tokens of each row may see.

    Returns:
      i32[B] the first slot; keys and values of N slots, in the cache's form.
    """
    rows, slots = len(positions), cache.slots
    # At multiples of `step` products add the keys in the same order as from slot 0.
    step = ADDED if precision.sums == "fixed" else TILE
    back = slots if window is None else window - 1
    near = slots - (slots - back - positions.shape[1] - step + 1) // step * step
    first = jnp.zeros(rows, jnp.int32)
    if near < slots:
        first = jnp.clip((positions[:, 0] - back) // step * step, 0, slots - near)

    def read(part: jax.Array, *, axis: int) -> jax.Array:
        if near >= slots:
            return from_bits(part[place], precision.compute)
        sizes = [near if i == axis else size for i, size in enumerate(part.shape)]

        def of_row(row: jax.Array, first: jax.Array) -> jax.Array:
            starts = [first if i == axis else 0 for i in range(part.ndim)]
            starts[:2] = place, row
            return lax.dynamic_slice(part, starts, (1, 1, *sizes[2:]))[0, 0]

        found = jax.vmap(of_row)(jnp.arange(rows, dtype=jnp.int32), first)
        return from_bits(found, precision.compute)

    keys = read(cache.keys, axis=4 if cache.for_cpu else 3)
    if cache.values is None:
        values = keys.swapaxes(2, 3) if cache.for_cpu else keys
        return first, keys, pad_values(values, precision)
    return first, keys, read(cache.values, axis=3)


def cache_entries(k: jax.Array, v: jax.Array, context: LayerContext, *, for_cpu: bool) -> Cache:
    """Returns one layer's part of the cache from keys and values [B, T, K, hd]."""
    precision = context.precision
    k, v = (to_bits(x.astype(precision.compute)) for x in (k, v))
    keys = k.transpose(0, 2, 3, 1) if for_cpu else k.transpose(0, 2, 1, 3)
    if context.absorbed:
        return Cache(keys, None, for_cpu=for_cpu)
    if for_cpu:
        joined = _joined_heads(*v.shape[2:], precision=precision)
        v = v.reshape(*v.shape[:2], -1, joined * v.shape[3])
    values = pad_values(v.transpose(0, 2, 1, 3), precision)
    return Cache(keys, values, for_cpu=for_cpu)


def _joined_heads(heads: int, width: int, *, precision: Precision) -> int:
    """Returns the number of key heads whose values stand side by side in one matrix: with fixed
    sums, those that fill the columns to which `pad_values` would pad each of them."""
    joined = TILE // width if TILE % width == 0 else 1
    return joined if precision.sums == "fixed" and heads % joined == 0 else 1


def write_entries(
    cache: Cache, new: Cache, place: jax.Array, tokens: tuple[jax.Array, jax.Array]
) -> Cache:
    """Writes one layer's entries for tokens, given as rows, i32[B, 1], and positions, i32[B, T]."""
    rows, positions = tokens
    heads = jnp.arange(new.keys.shape[1])[None, :, None]
    at = (place, rows[:, :, None], heads, positions[:, None, :])
    keys, values = cache.keys, cache.values
    if cache.for_cpu:
        new_keys = new.keys.transpose(0, 3, 1, 2)
        keys = keys.at[place, rows, :, :, positions].set(new_keys, mode="drop")
    else:
        keys = keys.at[at].set(new.keys, mode="drop")
    if values is not None and new.values is not None:
        if cache.for_cpu:
            new_values = new.values.transpose(0, 2, 1, 3)
            values = values.at[place, rows, :, positions].set(new_values, mode="drop")
        else:
            values = values.at[at].set(new.values, mode="drop")
    return dataclasses.replace(cache, keys=keys, values=values)
