"""The transformer layer, defined once: training, prefill and decoding differ in how they find keys
and values."""

from collections.abc import Callable
from typing import Any

import jax

from jaxrl.models.experts import Routing, mixture
from jaxrl.models.layers import Layer, LayerContext, project, rms_norm
from jaxrl.models.rope import RopeTable, apply_rope

# (q [B, T, H, hd], k [B, T, K, hd], v like k) -> attention's output [B, T, H, hd], and anything
# that the caller wants to keep, such as a cache.
Attention = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


def block(
    x: jax.Array,
    layer: Layer,
    attend: Attention,
    *,
    table: RopeTable,
    context: LayerContext,
    recorded: jax.Array | None = None,
) -> tuple[jax.Array, Any, Routing | None]:
    """Computes one layer: attention, then the feed-forward network, each added to the stream.

    Args:
      x: [B, T, D], the residual stream.
      layer: parameters of the layer.
      attend: attention over the keys and values that the queries may see.
      table: cosines and sines of the tokens' positions, see `rope.rope_table`.
      context: what all layers share.
      recorded: i32[B, T, k], experts to replay, see `experts.mixture`.

    Returns:
      The new stream in `precision.activations`, what `attend` keeps, and the routing, None for a
      dense layer.
    """
    constrain, stream = context.constrain, ("batch", "length", "embed")
    q, k, v = project_qkv(x, layer, table, context=context)
    out, kept = attend(q, k, v)
    flat = out.reshape(*x.shape[:2], -1)
    x = constrain(x + project(flat, layer, "o", precision=context.precision), stream)
    normed, routing = context.norm(x, layer["mlp_norm"]), None
    if context.config.experts is None:
        more = swiglu(normed, layer, context=context)
    else:
        more, routing = mixture(normed, layer, context=context, recorded=recorded)
    return constrain(x + more, stream), kept, routing


def project_qkv(
    x: jax.Array, layer: Layer, table: RopeTable, *, context: LayerContext
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes queries [B, T, H, hd], keys and values [B, T, K, hd] of a residual stream [B, T, D]:
    norm, projections, biases, head norms, rope. The results are in `precision.activations`."""
    config, precision = context.config, context.precision
    x = context.norm(x, layer["attn_norm"])

    def heads(name: str, axis: str) -> jax.Array:
        y = project(x, layer, name, precision=precision)
        if config.qkv_bias:
            bias = layer[f"{name}_bias"].astype(precision.accumulate).reshape(1, 1, -1)
            y = (y.astype(precision.accumulate) + bias).astype(precision.activations)
        y = context.constrain(y, ("batch", "length", axis))
        y = y.reshape(*x.shape[:2], -1, config.head_dim)
        if name == "v":
            return y
        if config.qk_norm:
            scale = layer[f"{name}_norm"]
            y = rms_norm(y, scale, eps=config.rms_norm_eps, precision=precision)
        return apply_rope(y, table.of_queries() if name == "q" else table, precision=precision)

    return heads("q", "q_heads"), heads("k", "kv_heads"), heads("v", "kv_heads")


def swiglu(x: jax.Array, layer: Layer, *, context: LayerContext) -> jax.Array:
    """Computes the dense feed-forward network (arXiv:2002.05202) of a normed stream: [B, T, D] ->
    [B, T, D], to be added to the stream."""
    precision = context.precision
    gate = project(x, layer, "gate", precision=precision).astype(precision.accumulate)
    up = project(x, layer, "up", precision=precision).astype(precision.accumulate)
    hidden = (jax.nn.silu(gate) * up).astype(precision.activations)
    hidden = context.constrain(hidden, ("batch", "length", "mlp"))
    return project(hidden, layer, "down", precision=precision)
