"""cuDNN's flash attention on NVIDIA GPUs: over packed sequences since Hopper, else with a mask.

Its packed form computes each sequence of a row by itself, so that tokens of other sequences cost
nothing. Before Hopper, where a device has only part of a row's queries, and where sequences share
prefixes, the kernel gets a mask of [B, 1, T, S] and computes all causal scores of a row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.core.packing import most_sequences
from jaxrl.core.precision import Precision
from jaxrl.models.attention.blocks import Part
from jaxrl.models.attention.scores import Scoring
from jaxrl.models.attention.visible import Tree, in_segments, in_tree

# With fewer heads of keys than of queries, older versions give cuDNN the offsets of sequences in
# keys and values for the number of query heads (jax-ml/jax#39521).
_SHARED = jax.__version_info__ >= (0, 11)


def head_dim_limit(capability: str) -> int:
    """Returns the largest head size on a GPU of this compute capability, such as "9.0"."""
    return 256 if is_hopper(capability) else 128


def is_hopper(capability: str) -> bool:
    """Returns True for the compute capability of Hopper or a later generation."""
    return int(capability.split(".")[0]) >= 9


def find_sequences(segments: jax.Array, *, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds the runs of equal numbers in segments i32[B, T] for cuDNN, including padding.

    Returns:
      Their lengths i32[B, most] in tokens, the indices of their first tokens i32[B, most + 1], both
      -1 after the last run of a row, and the number of runs i32[B].
    """
    # No segment is numbered -1, so that a row's first token always begins a run.
    before = jnp.pad(segments, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    number = jnp.cumsum(segments != before, axis=1) - 1
    tokens = jnp.arange(segments.shape[1], dtype=jnp.int32)

    def of_row(number):
        # Runs past `most` fall outside of the arrays, where JAX drops them; `packed` notices by
        # their number.
        starts = jnp.full(most + 1, segments.shape[1], jnp.int32).at[number].min(tokens)
        return jnp.zeros(most, jnp.int32).at[number].add(1), starts

    lengths, starts = jax.vmap(of_row)(number)
    empty = lengths == 0
    starts = jnp.where(jnp.pad(empty, ((0, 0), (0, 1)), constant_values=True), -1, starts)
    return jnp.where(empty, -1, lengths), starts, number[:, -1] + 1


def packed(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    *,
    scoring: Scoring,
    precision: Precision,
) -> jax.Array:
    """Computes `blocks.attention` over whole rows by the packed form, for scores without cap.

    A row with more than `most_sequences` gives NaN. Before jax 0.11, keys and values are repeated
    for the query heads that share them (`_SHARED`).
    """
    # jax.nn.dot_product_attention has no arguments for packed sequences.
    from jax._src.cudnn import fused_attention_stablehlo as fused

    groups = 1 if _SHARED else q.shape[2] // k.shape[2]
    q, k, v = (x.astype(precision.compute) for x in (q, k, v))
    most = most_sequences(q.shape[1]) + 1  # padding is one, too
    lengths, starts, count = find_sequences(segments, most=most)
    # A compiled program cannot raise an error. NaN cannot be mistaken for a result. The pass that
    # makes the queries writes it; the result would be read and written once more.
    q = jnp.where((count <= most)[:, None, None, None], q, jnp.nan)
    out = fused.dot_product_attention(
        q,
        jnp.repeat(k, groups, axis=2),
        jnp.repeat(v, groups, axis=2),
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        scale=scoring.scale,
        mask_type=fused.MaskType.PADDING_CAUSAL,
        sliding_window_length=scoring.window,
    )
    assert isinstance(out, jax.Array)  # without return_residual
    return out.astype(precision.activations)


def masked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | Tree,
    *,
    scoring: Scoring,
    precision: Precision,
    part: Part | None = None,
) -> jax.Array:
    """Computes `blocks.attention` with a mask."""
    first, of_keys = (0, segments) if part is None else part
    window = scoring.window
    queries, keys = first + jnp.arange(q.shape[1]), jnp.arange(k.shape[1])
    if isinstance(segments, Tree):
        assert isinstance(of_keys, Tree)
        seen = in_tree(of_keys, keys, segments.positions, queries, window=window)
    else:
        assert not isinstance(of_keys, Tree)
        seen = in_segments(segments, of_keys, queries[:, None] - keys[None, :], window=window)
    q, k, v = (x.astype(precision.compute) for x in (q, k, v))
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=seen[:, None],
        scale=scoring.scale,
        is_causal=part is None,  # lets the kernel skip blocks; the mask says it again
        implementation="cudnn",
    )
    return out.astype(precision.activations)


def keeping(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a remat policy that also keeps the inputs of cuDNN's backward pass. JAX creates its
    softmax sums internally, where they cannot be named."""

    def kept(primitive: Any, *args: Any, **params: Any) -> Any:
        own = primitive.name == "dot_product_attention_fwd_wrapper"
        return own or policy(primitive, *args, **params)

    return kept
