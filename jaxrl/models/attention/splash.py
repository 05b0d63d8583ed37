"""Splash: the TPU's flash attention from jax.experimental.pallas, for rows of several sequences.

The kernel leaves out blocks that no query sees. Which these are is known at compile time for the
causal mask and windows; for the sequences of a row it is found at run time (`_of_rows`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core.precision import Precision
from jaxrl.models.attention.blocks import Part
from jaxrl.models.attention.scores import Scoring
from jaxrl.models.attention.tree import KEPT
from jaxrl.models.products import named
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
# Rows of a device up to which that kernel is used: each has one of its own, as a part of the keys
# would write zeros for the queries of all other rows.
_FUSED_ROWS = 4


def build(q: jax.Array, layout: Layout, *, scoring: Scoring, interpret: bool) -> Any:
    """Builds the kernel for queries [B, T, H, hd], of which each device has its part. `interpret`
    runs it without a TPU, slowly."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # slow to import

    length, shards = q.shape[1], layout.count("length")
    kind = layout.mesh.devices.flat[0].device_kind
    block = block_size(length // shards, kind)
    few = q.shape[0] // layout.count("batch") <= _FUSED_ROWS
    fused = few and is_fused(length, block, kind)
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
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    # The kernel does not scale, so that keys are rounded once more than in `blocks.attention`. They
    # have fewer heads than queries.
    if scoring.scale != 1:
        k = k.astype(precision.accumulate) * scoring.scale
    arrays = [_padded(x.astype(precision.compute)) for x in (q, k, v)]
    of_keys = segments if part is None else part.segments

    def some(rows: slice) -> jax.Array:
        queries, keys = segments[rows], of_keys[rows]
        ids = splash.SegmentIds(q=queries.reshape(-1), kv=keys.reshape(-1))
        given = (_joined(x[rows]) for x in arrays)
        out = _attention(_of_rows(kernel, queries, keys), *given, ids, scoring.sinks)
        return out.reshape(len(out), *queries.shape, -1).transpose(1, 2, 0, 3)

    at_once = len(q) if _all_at_once(kernel, of_keys) else 1
    parts = [some(slice(i, i + at_once)) for i in range(0, len(q), at_once)]
    out = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return out[..., : v.shape[-1]].astype(precision.activations)


@jax.custom_vjp
def _attention(
    kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array, ids: Any, sinks: jax.Array | None
) -> jax.Array:
    """Calls the kernel, and names what its backward pass needs. The kernel can name its results
    itself, but not as integers (`products.named`): what a remat policy keeps of a float passes
    through `reduce_precision`, for which libtpu 0.0.48.1 makes a pass of its own."""
    return kernel(q, k, v, ids, sinks)


def _forward(kernel, q, k, v, ids, sinks):
    inputs = (q, k, v, sinks)
    out, backward = jax.vjp(lambda q, k, v, sinks: kernel(q, k, v, ids, sinks), *inputs)
    residuals, structure = jax.tree.flatten(backward)
    # Besides its inputs and lists of integers: its output and its log-sum-exp.
    own = {
        id(x): named(x, KEPT)
        for x in (out, *residuals)
        if jnp.issubdtype(x.dtype, jnp.floating) and not any(x is one for one in inputs)
    }
    kept = [own.get(id(x), x) for x in (out, *residuals)]
    return kept[0], jax.tree.unflatten(structure, kept[1:])


def _backward(backward, dout):
    dq, dk, dv, dsinks = backward(dout)
    return None, dq, dk, dv, None, dsinks


_attention.defvjp(_forward, _backward)


def _all_at_once(kernel: Any, of_keys: jax.Array) -> bool:
    """Tells if one call computes all rows, see `_FUSED_ROWS` and `_LONGEST`."""
    return not kernel.kwargs["block_sizes"].use_fused_bwd_kernel and of_keys.size <= _LONGEST


def _joined(x: jax.Array) -> jax.Array:
    """Turns rows [B, T, H, hd] into one, as the kernel takes it: [H, B * T, hd]."""
    return x.transpose(2, 0, 1, 3).reshape(x.shape[2], -1, x.shape[3])


def _padded(x: jax.Array) -> jax.Array:
    """Fills heads up to the lanes with zeros, which change no product. The kernel would hold them
    so in any case."""
    more = -x.shape[-1] % LANES
    return jnp.pad(x, [(0, more * (axis == x.ndim - 1)) for axis in range(x.ndim)])


def _of_rows(kernel: Any, of_queries: jax.Array, of_keys: jax.Array) -> Any:
    """Returns the kernel for rows with these segments i32[B, T], i32[B, S], one behind the other.
    It leaves out blocks whose queries and keys are of different rows or sequences."""
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
        i, j = listed, jnp.arange(first.shape[1])[None, None, :]
        if not lists_queries:
            i, j = jnp.arange(low.shape[1])[None, :, None], listed
        seen = (low[:, i] <= last[:, j]) & (first[:, j] <= high[:, i])
        axis, blocks = (2, low.shape[1]) if lists_queries else (1, first.shape[1])
        info = _repeated(info, len(of_queries), axis=axis, blocks=blocks, keys=of_keys.shape[1])
        seen = jnp.concatenate(seen, axis=axis)
        changed.append(info._replace(block_mask=jnp.where(seen, info.block_mask, 0)))
    return type(kernel)(*changed, **kernel.kwargs)


def _repeated(info: Any, rows: int, *, axis: int, blocks: int, keys: int) -> Any:
    """Repeats the lists of a row along `axis`. Those of each further row begin after the `blocks`
    listed and the `keys` of the rows before it."""
    if rows == 1:
        return info
    tiled = {
        name: jnp.concatenate([x] * rows, axis=axis)
        for name in ("block_mask", "mask_next")
        if (x := getattr(info, name)) is not None
    }
    small = np.min_scalar_type(-rows * blocks)  # scalar memory is scarce
    numbers = [info.data_next.astype(small) + small.type(row * blocks) for row in range(rows)]
    tiled["data_next"] = jnp.concatenate(numbers, axis=axis)
    if info.q_sequence is not None:
        of_rows = jnp.arange(rows, dtype=jnp.int32)[:, None] * keys
        tiled["q_sequence"] = (info.q_sequence[None] + of_rows).reshape(-1)
    return info._replace(**tiled)


def _ranges(segments: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first and last sequence of each block of rows i32[B, T]; padding, numbered 0,
    comes last."""
    numbers = jnp.where(segments == 0, jnp.iinfo(jnp.int32).max, segments)
    numbers = numbers.reshape(len(segments), -1, block)
    return jnp.min(numbers, axis=2), jnp.max(numbers, axis=2)
