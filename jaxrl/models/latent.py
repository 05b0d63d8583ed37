"""Multi-head latent attention (arXiv:2405.04434): keys and values are made of one narrow projection
of the stream."""

import jax
import jax.numpy as jnp

from jaxrl.models.layers import Layer, LayerContext, project, rms_norm
from jaxrl.models.rope import RopeTable, apply_rope

_EPS = 1e-6  # of the norms of the narrow projections, whatever that of the others is


def project_latent(
    x: jax.Array, layer: Layer, table: RopeTable, *, context: LayerContext
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes queries and keys [B, T, H, hd] and values [B, T, H, vd] of a normed stream
    [B, T, D], in `precision.activations`.

    The dimensions that rope rotates come first; those of keys are the same in all heads.
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
        q = project(x, layer, "q", precision=precision)
    else:
        q = narrow(project(x, layer, "q_down", precision=precision), "q_down_norm")
        q = project(q, layer, "q_up", precision=precision)
    q = heads(q, "q_heads", config.head_dim)
    q = jnp.concatenate([rotate(q[..., kept:]), q[..., :kept]], axis=-1)
    both = project(x, layer, "kv_down", precision=precision)
    shared = rotate(both[..., None, latent.kv_rank :])
    low = narrow(both[..., : latent.kv_rank], "kv_down_norm")
    kv = project(low, layer, "kv_up", precision=precision)
    kv = heads(kv, "kv_heads", kept + latent.value_dim)
    shared = jnp.broadcast_to(shared, (*kv.shape[:3], rotated))
    return q, jnp.concatenate([shared, kv[..., :kept]], axis=-1), kv[..., kept:]
