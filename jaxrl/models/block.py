"""The transformer layer, defined once: training, prefill and decoding differ in how they find keys
and values."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models import gated_unit
from jaxrl.models.experts import Routing, mixture
from jaxrl.models.heads import Settings, arrange, join
from jaxrl.models.heads_on_gpu import turn
from jaxrl.models.latent import project_latent, values_of_heads
from jaxrl.models.layers import OWN, Layer, LayerContext, add_bias, project
from jaxrl.models.linear_attention import linear_attention
from jaxrl.models.rope import RopeTable, apply_rope
from jaxrl.models.stream_norm import Copies, add_and_norm

# (q [B, T, H, hd], k [B, T, K, hd], v [B, T, K, vd]) -> attention's output [B, T, H, vd], and
# anything that the caller wants to keep, such as a cache. Linear layers take a
# `linear_attention.Recurrence` instead.
Attention = Callable[..., tuple[jax.Array, Any]]


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

    A layer has the norms that its family declares (`parameters.param_specs`): before attention and
    the feed-forward network, after them, or both.

    Args:
      x: [B, T, D], the residual stream.
      layer: parameters of the layer.
      attend: attention over the visible keys and values, or the recurrence of a linear layer.
      table: cosines and sines of the tokens' positions, see `rope.rope_table`.
      context: settings of all layers.
      recorded: i32[B, T, k], experts to replay, see `experts.mixture`.

    Returns:
      The new stream in `precision.activations`, the second result of `attend`, and the routing,
      None for a dense layer.
    """
    constrain, stream = context.constrain, ("batch", "length", "embed")
    precision = context.precision
    if "conv" in layer:
        normed = context.layer_norm(x, layer, "attn_norm")
        more, kept = linear_attention(normed, layer, attend, context=context)
    else:
        x, normed = add_and_norm(x, None, layer, "attn_norm", copies=3, context=context)
        q, k, v, gate = project_qkv(normed, layer, table, context=context)
        out, kept = attend(q, k, v)
        if context.absorbed:
            out = values_of_heads(out, layer, context=context)
        flat = _joined(out, context=context)
        if gate is not None:
            flat = _opened(flat, gate, context=context)
        more = project(flat, layer, "o", context=context)
        more = add_bias(more, layer, "o", precision=precision)
    more, routing = context.layer_norm(more, layer, "attn_out_norm"), None
    copies = 1 if "router" in layer else 2
    x, normed = add_and_norm(x, more, layer, "mlp_norm", copies=copies, context=context)
    if "router" not in layer:
        more = gated(normed, layer, context=context)
    else:
        normed = normed[0]
        more, routing = mixture(normed, layer, context=context, recorded=recorded)
        if "shared_gate" in layer:
            shared = gated((normed, normed), layer, context=context, prefix="shared_")
            if "shared_score" in layer:
                score = project(normed, layer, "shared_score", context=context)
                shared = _opened(shared, score, context=context)
            more = more + shared
    x = precision.rounded(x + context.layer_norm(more, layer, "mlp_out_norm"), "stream")
    return constrain(x, stream), kept, routing


def _opened(x: jax.Array, gate: jax.Array, *, context: LayerContext) -> jax.Array:
    """Multiplies by the sigmoid of a gate, in `accumulate`; the result is in `activations`."""
    precision = context.precision
    x, gate = x.astype(precision.accumulate), gate.astype(precision.accumulate)
    return precision.rounded(x * jax.nn.sigmoid(gate), "products")


def project_qkv(
    normed: Copies, layer: Layer, table: RopeTable, *, context: LayerContext
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Computes queries [B, T, H, hd], keys and values [B, T, K, hd] of three copies of a normed
    stream [B, T, D]: projections, biases, norms of queries and keys, rope. The fourth result is the
    gate [B, T, H * hd] of attention's output, None in families without one. All are in
    `precision.activations`."""
    config, precision, x = context.config, context.precision, normed[0]
    if config.latent is not None:
        return (*project_latent(x, layer, table, context=context), None)

    def heads(y: jax.Array, name: str, axis: str) -> jax.Array:
        y = precision.rounded(y, "cache" if name == "v" else "products")
        y = add_bias(y, layer, name, precision=precision)
        y = context.constrain(y, ("batch", "length", axis))
        if config.qk_norm == "projection":
            y = context.layer_norm(y, layer, f"{name}_norm")
        if context.by_heads:
            y = _arranged(y, layer, table, name, axis, context=context)
            return precision.rounded(y, "softmax" if name == "q" else "cache")
        if context.on_gpu and name != "v":
            y = _arranged(y, layer, table, name, axis, context=context)
            return precision.rounded(y, "softmax" if name == "q" else "cache")
        y = y.reshape(*x.shape[:2], -1, config.head_dim)
        if config.qk_norm == "head":
            y = context.layer_norm(y, layer, f"{name}_norm")
        if name == "v":
            return y
        own = table.queries if name == "q" else None
        y = apply_rope(y, own or table, precision=precision)
        return precision.rounded(y, "cache" if name == "k" else "softmax")

    if config.fused:
        queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        joint = project(x, layer, "qkv", context=context)
        q, k, v = jnp.split(joint, (queries, queries + keys), axis=-1)
    else:
        projected = zip(normed, "qkv", strict=True)
        q, k, v = (project(x, layer, name, context=context) for x, name in projected)
    gate = None
    if config.output_gate:  # beside the queries of each head
        both = q.reshape(*x.shape[:2], config.num_heads, 2, config.head_dim)
        q, gate = (both[..., i, :].reshape(*x.shape[:2], -1) for i in range(2))
    return heads(q, "q", "q_heads"), heads(k, "k", "kv_heads"), heads(v, "v", "kv_heads"), gate


def _arranged(y, layer, table, name, axis, *, context):
    """Makes queries, keys or values of a projection [B, T, N * hd] by `heads.arrange`, on each
    device's part."""
    config, arrays, tokens = context.config, {"y": y}, ("batch", "length")
    axes: dict[str, Sequence[str]] = {"y": (*tokens, axis)}
    if name != "v":
        own = (table.queries if name == "q" else None) or table
        arrays |= {"cos": own.cos, "sin": own.sin}
        axes |= dict.fromkeys(("cos", "sin"), (*tokens, "head_dim", "head_dim"))
    if config.qk_norm == "head" and name != "v":
        arrays["weight"] = context.norm_weight(layer[f"{name}_norm"])
        axes["weight"] = ("head_dim",)
    factor = context.key_factor if name == "k" else 1.0
    settings = Settings(config.head_dim, config.rms_norm_eps, context.precision, factor)

    def on_device(*given: jax.Array) -> jax.Array:
        own = dict(zip(arrays, given, strict=True))
        rotation = RopeTable(own["cos"], own["sin"]) if "cos" in own else None
        if context.on_gpu and rotation is not None:
            return turn(own["y"], rotation, own.get("weight"), settings)
        return arrange(own["y"], rotation, own.get("weight"), settings)

    output = (*tokens, axis, "head_dim")
    run = context.local(on_device, inputs=tuple(axes.values()), output=output)
    return run(*arrays.values())


def _joined(out: jax.Array, *, context: LayerContext) -> jax.Array:
    """Returns attention's output [B, T, H, hd] as [B, T, H * hd]."""
    if not context.by_heads:
        return out.reshape(*out.shape[:2], -1)
    config, axes = context.config, ("batch", "length", "q_heads")
    settings = Settings(out.shape[-1], config.rms_norm_eps, context.precision)
    join_own = functools.partial(join, settings=settings)
    return context.local(join_own, inputs=((*axes, "head_dim"),), output=axes)(out)


def gated(normed: Copies, layer: Layer, *, context: LayerContext, prefix: str = "") -> jax.Array:
    """Computes the dense feed-forward network (arXiv:2002.05202) of two copies of a normed stream:
    [B, T, D] -> [B, T, D], to be added to the stream. Its parameters' names begin with `prefix`."""
    config, precision = context.config, context.precision
    if config.fused:
        gate, up = jnp.split(project(normed[0], layer, "gate_up", context=context), 2, axis=-1)
    else:
        names = (f"{prefix}gate", f"{prefix}up")
        projected = zip(normed, names, strict=True)
        gate, up = (project(x, layer, name, context=context) for x, name in projected)
    own = {name: x for name, x in layer.items() if name.startswith(f"{prefix}down") or name == OWN}

    def down(hidden: jax.Array, own: Layer) -> jax.Array:
        hidden = context.constrain(hidden, ("batch", "length", "mlp"))
        return project(hidden, own, f"{prefix}down", context=context)

    settings = gated_unit.Settings(config.activation, precision)
    if context.on_gpu:
        then = gated_unit.Then(down, context.local)
        return gated_unit.multiplied(gate, up, own, then, settings)
    return down(gated_unit.plain(gate, up, settings), own)
