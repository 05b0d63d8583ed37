"""cuDNN's flash attention on NVIDIA GPUs: over packed sequences since Hopper, else with a mask.

Its packed form computes each sequence of a row by itself, so that tokens of other sequences cost
nothing. Before Hopper, where a device has only part of a row's queries, and where sequences share
prefixes, the kernel gets a mask of [B, 1, T, S] and computes all causal scores of a row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.core.precision import Precision
from jaxrl.core.runs import Runs, most_sequences, run_begins
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


def find_runs(segments: jax.Array, runs: Runs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Finds the runs of equal numbers in segments i32[B, T] for cuDNN, see `core.Runs`.

    Returns:
      Their lengths i32[B, most] in tokens, the indices of their first tokens i32[B, most], both -1
      after the last run of a row; and bool[B], False for a row whose runs exceed the bounds.
    """
    before = jnp.roll(segments, 1, axis=1)
    number = jnp.cumsum(run_begins(segments, longest=runs.longest, before=before), axis=1) - 1
    tokens = jnp.arange(segments.shape[1], dtype=jnp.int32)

    def of_row(number):
        # Runs past `most` fall outside of the arrays, where JAX drops them.
        starts = jnp.full(runs.most, segments.shape[1], jnp.int32).at[number].min(tokens)
        return jnp.zeros(runs.most, jnp.int32).at[number].add(1), starts

    lengths, starts = jax.vmap(of_row)(number)
    fits = (number[:, -1] < runs.most) & (jnp.max(lengths, axis=1) <= runs.longest)
    return jnp.where(lengths > 0, lengths, -1), jnp.where(lengths > 0, starts, -1), fits


def _places(starts: jax.Array, *, length: int, runs: Runs, token: int) -> jax.Array:
    """Writes the places of runs for jax as if rows had `runs.longest` tokens, not `length`: cuDNN
    reserves a row's length for each run.

    The runs of a row are listed in these shorter rows, in any of them. jax adds the tokens before
    the shorter row to each place, which must not be negative, and multiplies the sum by the size of
    a `token`. A place before its row is therefore given a power of two more, which multiplied is 0
    in 32 bits.

    Args:
      starts: i32[B, most] in rows of `length` tokens, -1 for none.
      length: tokens of a row.
      runs: the bounds of the runs.
      token: size of a token's keys, heads times head_dim; that of its queries is a multiple.

    Returns:
      i32[B * length / longest, n], -1 for none.
    """
    parts = length // runs.longest
    row = jnp.arange(len(starts), dtype=jnp.int32)[:, None]
    first = runs.longest * jnp.arange(len(starts) * parts, dtype=jnp.int32)[:, None]
    placed = _in_rows(jnp.where(starts < 0, -1, starts + length * row), parts)
    vanishes = 2 ** (32 - (token & -token).bit_length() + 1)
    own = placed - first + jnp.where(placed < first, vanishes, 0)
    return jnp.where(placed < 0, -1, own)


def _in_rows(x: jax.Array, parts: int) -> jax.Array:
    """Divides each row's numbers over so many rows, filled up with -1: [B, n] -> [B * parts, m]."""
    columns = max(2, -(-x.shape[1] // parts))  # jax takes a row with one run for unpacked
    padded = jnp.pad(x, ((0, 0), (0, columns * parts - x.shape[1])), constant_values=-1)
    return padded.reshape(-1, columns)


def packed(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    *,
    scoring: Scoring,
    precision: Precision,
    runs: Runs | None = None,
) -> jax.Array:
    """Computes `blocks.attention` over whole rows by the packed form, for scores without cap.

    A row beyond the bounds of `runs` gives NaN; None are those of `TokenBatch.runs`. Before jax
    0.11, keys and values are repeated for the query heads that share them (`_SHARED`).
    """
    # jax.nn.dot_product_attention has no arguments for packed sequences.
    from jax._src.cudnn import fused_attention_stablehlo as fused

    groups = 1 if _SHARED else q.shape[2] // k.shape[2]
    q, k, v = (x.astype(precision.compute) for x in (q, k, v))
    length = q.shape[1]
    runs = Runs(most_sequences(length) + 1, length) if runs is None else runs
    lengths, starts, fits = find_runs(segments, runs)
    # A compiled program cannot raise an error. NaN cannot be mistaken for a result. The pass that
    # makes or repeats the keys adds it; the result would be read and written once more.
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    k += jnp.where(fits, 0, jnp.nan)[:, None, None, None].astype(k.dtype)
    starts = _places(starts, length=length, runs=runs, token=k.shape[2] * k.shape[3])
    starts = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)
    lengths = _in_rows(lengths, length // runs.longest)
    out = fused.dot_product_attention(
        *(x.reshape(-1, runs.longest, *x.shape[2:]) for x in (q, k, v)),
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        scale=scoring.scale,
        mask_type=fused.MaskType.PADDING_CAUSAL,
        sliding_window_length=scoring.window,
    )
    assert isinstance(out, jax.Array)  # without return_residual
    return out.reshape(q.shape).astype(precision.activations)


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
