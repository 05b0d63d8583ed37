"""Splash: the TPU's flash attention from jax.experimental.pallas, for rows of several sequences.

The kernel leaves out blocks that no query sees. Which these are is known at compile time for the
causal mask and windows; for the sequences of a row it is found at run time (`_of_row`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.core.precision import Precision
from jaxrl.models.attention.blocks import Part
from jaxrl.models.attention.scores import Scoring
from jaxrl.models.attention.tree import KEPT
from jaxrl.sharding.partition import Layout

LANES = 128  # of a TPU's vector unit; a device's tokens of a row must be a multiple
# Tokens per block; the first that divides a row is used. Blocks of 1,024 cost 8 to 10 % less per
# score on v6e and nothing less on v5p (docs/results/chips.md); in short rows they mask more.
_BLOCKS = (1024, 512, 256, 128)
_LONG, _LARGE = 8192, ("TPU v6 lite", "TPU7x")
# Longer parts have the largest blocks on all chips: the kernel's lists, a number for each block of
# queries and of keys, lie in scalar memory.
_LONGEST = 131_072
# Parts up to which one kernel computes all gradients on these chips: it writes the gradient of the
# queries once for each part of the keys, in their dtype, and XLA adds the parts.
_FUSED = 4
# Rows up to which each has kernels of its own. A batch of rows is a loop, because their masks are
# found at run time, and it copies each row's arrays in and out.
_UNROLLED = 4


def build(q: jax.Array, layout: Layout, *, scoring: Scoring, interpret: bool) -> Any:
    """Builds the kernel for queries [B, T, H, hd], of which each device has its part. `interpret`
    runs it without a TPU, slowly."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # slow to import

    length, shards = q.shape[1], layout.count("length")
    kind = layout.mesh.devices.flat[0].device_kind
    block = block_size(length // shards, kind)
    fused = is_fused(length, block, kind)
    if scoring.window is None:
        mask = splash.CausalMask((length, length), shard_count=shards)
    else:
        mask = splash.LocalMask((length, length), (scoring.window - 1, 0), 0, shard_count=shards)
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * (q.shape[2] // layout.count("q_heads"))),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=2 * block if fused else block,
            block_kv_dkv_compute=block,
            block_q_dq=None if fused else block,
            block_kv_dq=None if fused else block,
            use_fused_bwd_kernel=fused,
        ),
        attn_logits_soft_cap=scoring.cap,
        # shard_map has divided the heads; only the mask of the queries differs between devices.
        head_shards=1,
        q_seq_shards=shards,
        residual_checkpoint_name=KEPT,
        interpret=interpret,
    )


def block_size(tokens: int, kind: str) -> int:
    """Returns the tokens of a block, for this number of tokens of a row on a device."""
    large = tokens > _LONGEST or (tokens >= _LONG and kind in _LARGE)
    sizes = _BLOCKS if large else _BLOCKS[1:]
    return next(size for size in sizes if tokens % size == 0)


def is_fused(length: int, block: int, kind: str) -> bool:
    """Tells if one kernel computes all gradients, for rows of `length` keys."""
    wide = 2 * block
    parts, rest = divmod(length, wide)
    return kind in _LARGE and wide <= _BLOCKS[0] and rest == 0 and parts <= _FUSED


def attend(
    kernel: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    *,
    scoring: Scoring,
    part: Part | None,
    precision: Precision,
) -> jax.Array:
    """Computes `blocks.attention` with the result of `build`, whose window and soft cap count."""
    # The kernel does not scale, so that queries are rounded once more than in `blocks.attention`.
    scaled = q.astype(precision.accumulate) * scoring.scale
    arrays = (_padded(x.astype(precision.compute)) for x in (scaled, k, v))
    of_keys = segments if part is None else part.segments

    def row(q, k, v, of_queries, of_keys):
        from jax.experimental.pallas.ops.tpu import splash_attention as splash

        ids = splash.SegmentIds(q=of_queries, kv=of_keys)
        return _of_row(kernel, of_queries, of_keys)(q, k, v, ids, scoring.sinks)

    rows: Any = (*(x.transpose(0, 2, 1, 3) for x in arrays), segments, of_keys)
    if len(q) <= _UNROLLED:
        parts = zip(*(jax.lax.split(x, [1] * len(x)) for x in rows), strict=True)
        out = jnp.stack([row(*(x[0] for x in part)) for part in parts])
    else:
        out = jax.vmap(row)(*rows)
    return out.transpose(0, 2, 1, 3)[..., : v.shape[-1]].astype(precision.activations)


def _padded(x: jax.Array) -> jax.Array:
    """Fills heads up to the lanes with zeros, which change no product. The kernel would hold them
    so in any case."""
    more = -x.shape[-1] % LANES
    return jnp.pad(x, [(0, more * (axis == x.ndim - 1)) for axis in range(x.ndim)])


def _of_row(kernel: Any, of_queries: jax.Array, of_keys: jax.Array) -> Any:
    """Returns the kernel for a row with these segments i32[T], i32[S]: without the blocks whose
    queries and keys are of different sequences."""
    sizes, changed = kernel.kwargs["block_sizes"], []
    for info, queries, keys, lists_queries in (
        (kernel.fwd_mask_info, sizes.block_q, sizes.block_kv, False),
        (kernel.dq_mask_info, sizes.block_q_dq, sizes.block_kv_dq, False),
        (kernel.dkv_mask_info, sizes.block_q_dkv, sizes.block_kv_dkv, True),
    ):
        if info is None:
            changed.append(None)
            continue
        (low, high), (first, last) = _ranges(of_queries, queries), _ranges(of_keys, keys)
        # [1, blocks of queries, blocks of keys], where one of the two axes is a list of those seen.
        listed = info.data_next.astype(jnp.int32)
        i, j = listed, jnp.arange(len(first))[None, None, :]
        if not lists_queries:
            i, j = jnp.arange(len(low))[None, :, None], listed
        seen = (low[i] <= last[j]) & (first[j] <= high[i])
        changed.append(info._replace(block_mask=jnp.where(seen, info.block_mask, 0)))
    return type(kernel)(*changed, **kernel.kwargs)


def _ranges(segments: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first and last sequence of each block; padding, numbered 0, comes last."""
    numbers = jnp.where(segments == 0, jnp.iinfo(jnp.int32).max, segments).reshape(-1, block)
    return jnp.min(numbers, axis=1), jnp.max(numbers, axis=1)
