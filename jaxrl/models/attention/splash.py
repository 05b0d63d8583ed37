"""Splash: the TPU's flash attention from jax.experimental.pallas, for rows of several sequences.

The kernel leaves out blocks that no query sees. Which these are is known at compile time for the
causal mask and windows; for the sequences of a row it is found at run time (`_of_rows`). Rows of
which a head fits into fast memory have kernels of their own, in `splash_forward`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core.precision import Precision
from jaxrl.models.attention import splash_forward
from jaxrl.models.attention.blocks import Part
from jaxrl.models.attention.scores import Scoring
from jaxrl.models.attention.splash_blocks import LANES, Settings, Tokens, fits, ranges
from jaxrl.models.attention.tree import KEPT
from jaxrl.models.products import named
from jaxrl.sharding.partition import Layout

# Tokens per block; the first that divides a row is used. Blocks of 1,024 cost 8 to 10 % less per
# score on v6e and nothing less on v5p (docs/results/chips.md); in short rows they mask more.
_BLOCKS = (1024, 512, 256, 128)
_LONG, _LARGE = 8192, ("TPU v6 lite", "TPU7x")
# Longer parts have the largest blocks on all chips: the kernel's lists, a number for each block of
# queries and of keys, lie in scalar memory.
_LONGEST = 131_072


def build(q: jax.Array, v: jax.Array, layout: Layout, *, scoring: Scoring, interpret: bool) -> Any:
    """Builds the kernel for queries [B, T, H, hd] and values [B, T, K, vd], of which each device
    has its part; None if a head of a row fits into fast memory, for which `splash_forward` has
    kernels. `interpret` runs it without a TPU, slowly."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # slow to import

    length, shards = q.shape[1], layout.count("length")
    kind = layout.mesh.devices.flat[0].device_kind
    filled = {"head_dim": _filled(q.shape[3]), "value_dim": _filled(v.shape[3])}
    if fits(kind, queries=length // shards, keys=length, **filled):
        return None
    block = block_size(length // shards, kind)
    if scoring.window is None:
        mask = splash.CausalMask((length, length), shard_count=shards)
    else:
        mask = splash.LocalMask((length, length), (scoring.window - 1, 0), 0, shard_count=shards)
    of_gradients = ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes: dict[str, Any] = dict.fromkeys(("block_q", "block_kv", *of_gradients), block)
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * (q.shape[2] // layout.count("q_heads"))),
        block_sizes=splash.BlockSizes(**sizes),
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
    interpret: bool,
) -> jax.Array:
    """Computes `blocks.attention` with the result of `build` for the same arguments."""
    # The kernel does not scale, so that keys are rounded once more than in `blocks.attention`. They
    # have fewer heads than queries.
    if scoring.scale != 1:
        k = k.astype(precision.accumulate) * scoring.scale
    arrays = [_padded(x.astype(precision.compute)) for x in (q, k, v)]
    of_keys = segments if part is None else part.segments
    first = jnp.int32(0) if part is None else part.first
    settings = Settings(block_size(q.shape[1], ""), scoring.window, scoring.cap, interpret)

    def some(rows: slice) -> jax.Array:
        tokens = Tokens(queries := segments[rows], of_keys[rows], first)
        given = (*(_joined(x[rows]) for x in arrays), tokens, scoring.sinks)
        if kernel is None:
            out = splash_forward.attention(*given, settings)
        else:
            out = _attention(_of_rows(kernel, queries, of_keys[rows]), *given)
        return out.reshape(len(out), *queries.shape, -1).transpose(1, 2, 0, 3)

    # The lists of one call have to fit into scalar memory.
    at_once = len(q) if of_keys.size <= _LONGEST else 1
    parts = [some(slice(i, i + at_once)) for i in range(0, len(q), at_once)]
    out = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return out[..., : v.shape[-1]].astype(precision.activations)


@jax.custom_vjp
def _attention(
    kernel: Any, q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens, sinks: jax.Array | None
) -> jax.Array:
    """Calls the kernel, and names what its backward pass needs. The kernel can name its results
    itself, but not as integers (`products.named`): what a remat policy keeps of a float passes
    through `reduce_precision`, for which libtpu 0.0.48.1 makes a pass of its own."""
    return kernel(q, k, v, _segment_ids(tokens), sinks)


def _forward(kernel, q, k, v, tokens, sinks):
    inputs, ids = (q, k, v, sinks), _segment_ids(tokens)
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


def _segment_ids(tokens: Tokens) -> Any:
    """Returns the sequences as the kernel takes them, all rows in one."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    return splash.SegmentIds(q=tokens.of_queries.reshape(-1), kv=tokens.of_keys.reshape(-1))


def _joined(x: jax.Array) -> jax.Array:
    """Turns rows [B, T, H, hd] into one, as the kernel takes it: [H, B * T, hd]."""
    return x.transpose(2, 0, 1, 3).reshape(x.shape[2], -1, x.shape[3])


def _padded(x: jax.Array) -> jax.Array:
    """Fills heads up to the lanes with zeros, which change no product. The kernel would hold them
    so in any case."""
    more = _filled(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, [(0, more * (axis == x.ndim - 1)) for axis in range(x.ndim)])


def _filled(size: int) -> int:
    return size + -size % LANES


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
        (low, high), (first, last) = ranges(of_queries, queries), ranges(of_keys, keys)
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
