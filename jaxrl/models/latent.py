"""Multi-head latent attention (arXiv:2405.04434): keys and values come from one narrow projection
of the stream.

The expanded form computes them for each head. The absorbed form attends to the narrow projection
itself, as one head of keys that are also values. It multiplies each query by its head's key matrix
first, and the average of the narrow projection by the head's value matrix afterwards.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl.core import blocks
from jaxrl.core.precision import Precision
from jaxrl.models.layers import Layer, LayerContext, project, rms_norm, with_adapter
from jaxrl.models.products import batched_matmul, matmul
from jaxrl.models.rope import RopeTable, apply_rope

_EPS = 1e-6  # of the norms of the narrow projections; config.json gives it for other norms only


def check_form(precision: Precision | str, config: object) -> None:
    """Checks that a model supports the form of latent attention that the dtype policy names.

    Raises:
      ValueError: if it does not; the message names the setting and the family.
    """
    precision = Precision.of(precision)
    if precision.latent != "expanded" and getattr(config, "latent", None) is None:
        family = getattr(config, "model_type", type(config).__name__)
        raise ValueError(
            f"latent={precision.latent} is for multi-head latent attention, which the "
            f"family {family} does not have; leave it out"
        )


def project_latent(
    x: jax.Array, layer: Layer, table: RopeTable, *, context: LayerContext
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes queries and keys [B, T, H, hd] and values [B, T, H, vd] of a normed stream
    [B, T, D], in `precision.activations`.

    Rotated dimensions come first; all heads have the same ones in their keys. In the absorbed form,
    queries are [B, T, H, rope_dim + kv_rank], and keys and values are one array
    [B, T, 1, rope_dim + kv_rank]; pass attention's result to `values_of_heads`.
    """
    config, latent, precision = context.config, context.config.latent, context.precision
    assert latent is not None
    rotated, kept = latent.rope_dim, config.head_dim - latent.rope_dim

    def narrow(y: jax.Array, name: str) -> jax.Array:
        return rms_norm(y, layer[name], eps=_EPS, precision=precision)

    def heads(y: jax.Array, axis: str, size: int) -> jax.Array:
        y = context.constrain(y, ("batch", "length", axis))
        return y.reshape(*x.shape[:2], config.num_heads, size)

    def rotate(y: jax.Array) -> jax.Array:
        if latent.interleaved:  # pairs are neighbours
            y = jnp.concatenate([y[..., 0::2], y[..., 1::2]], axis=-1)
        return apply_rope(y, table, precision=precision)

    if latent.q_rank is None:
        q = project(x, layer, "q", context=context)
    else:
        q = narrow(project(x, layer, "q_down", context=context), "q_down_norm")
        q = project(q, layer, "q_up", context=context)
    q = heads(q, "q_heads", config.head_dim)
    q, turned = q[..., :kept], rotate(q[..., kept:])
    both = project(x, layer, "kv_down", context=context)
    shared = rotate(both[..., None, latent.kv_rank :])
    low = narrow(both[..., : latent.kv_rank], "kv_down_norm")
    if context.absorbed:
        q = jnp.concatenate([turned, _for_narrow_keys(q, layer, context=context)], axis=-1)
        keys = jnp.concatenate([shared, low[..., None, :]], axis=-1)
        return q, keys, keys
    q = jnp.concatenate([turned, q], axis=-1)
    kv = project(low, layer, "kv_up", context=context)
    kv = heads(kv, "kv_heads", kept + latent.value_dim)
    shared = jnp.broadcast_to(shared, (*kv.shape[:3], rotated))
    return q, jnp.concatenate([shared, kv[..., :kept]], axis=-1), kv[..., kept:]


def _for_narrow_keys(q: jax.Array, layer: Layer, *, context: LayerContext) -> jax.Array:
    """Multiplies the queries' dimensions without rope by their head's key matrix: [B, T, H, n] ->
    [B, T, H, kv_rank]."""
    precision, count = context.precision, q.shape[-1]

    def by_head(q: jax.Array, name: str, layer: Layer) -> jax.Array:
        matrix = _of_heads(layer, name, context=context)[:, :count]
        return _batched(q, matrix.swapaxes(1, 2), context=context)

    def adapter(q: jax.Array, own: Layer) -> jax.Array:
        return matmul(by_head(q, "kv_up_b", own), own["kv_up_a"].T, precision=precision)

    return _adapted(by_head(q, "kv_up", layer), adapter, q, layer, precision=precision)


def values_of_heads(out: jax.Array, layer: Layer, *, context: LayerContext) -> jax.Array:
    """Computes each head's result [B, T, H, vd] from the absorbed form's averages
    [B, T, H, rope_dim + kv_rank], in `precision.activations`."""
    latent, precision = context.config.latent, context.precision
    assert latent is not None
    low = out[..., latent.rope_dim :]

    def by_head(x: jax.Array, name: str, layer: Layer) -> jax.Array:
        matrix = _of_heads(layer, name, context=context)[:, -latent.value_dim :]
        return _batched(x, matrix, context=context)

    def adapter(low: jax.Array, own: Layer) -> jax.Array:
        return by_head(matmul(low, own["kv_up_a"], precision=precision), "kv_up_b", own)

    return _adapted(by_head(low, "kv_up", layer), adapter, low, layer, precision=precision)


def _of_heads(layer: Layer, name: str, *, context: LayerContext) -> jax.Array:
    """Divides a matrix of the layer by heads: [H * n, in] -> [H, n, in]."""
    matrix = blocks.matrix(layer[name], name, context.precision)
    return matrix.reshape(context.config.num_heads, -1, matrix.shape[-1])


def _batched(x: jax.Array, matrix: jax.Array, *, context: LayerContext) -> jax.Array:
    """Multiplies by a matrix for each head: [B, T, H, in] and [H, out, in] -> [B, T, H, out]."""
    batch, length, heads, _ = x.shape
    if context.precision.sums == "fixed":
        # XLA on CPU would read it transposed, and then add in another order for few rows.
        matrix = jax.lax.optimization_barrier(matrix)
    rows = x.transpose(2, 0, 1, 3).reshape(heads, batch * length, -1)
    y = batched_matmul(rows, matrix, form="nt", precision=context.precision)
    y = y.astype(context.precision.activations)
    return y.reshape(heads, batch, length, -1).transpose(1, 2, 0, 3)


def _adapted(
    y: jax.Array,
    adapter: Callable[[jax.Array, Layer], jax.Array],
    x: jax.Array,
    layer: Layer,
    *,
    precision: Precision,
) -> jax.Array:
    """Adds what the adapter of "kv_up" makes of x, if the layer has one, as `layers.project`."""
    if "kv_up_a" not in layer:
        return y
    wide = precision.accumulate
    more = with_adapter(adapter, x, layer, "kv_up").astype(wide)
    return (y.astype(wide) + more).astype(precision.activations)
