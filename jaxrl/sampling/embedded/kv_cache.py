"""The decoder with a KV cache: prefill of prompts, and a decode step of one token per row.

Prompts are padded on the left. All rows then write the same slot of the cache, and the last token
of every prompt is in the last column. A row's position is its slot minus its padding.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxrl.core.precision import Precision
from jaxrl.models.attention import attention
from jaxrl.models.decoder import Model
from jaxrl.models.experts import Routing, feed_forward
from jaxrl.models.layers import Layer, embed, matmul, project_qkv, rms_norm, rope_table
from jaxrl.models.spec import Params
from jaxrl.sampling.embedded.half_bits import from_bits, to_bits


@struct.dataclass
class Cache:
    """Keys and values of L layers, B rows and S slots, in the form of `to_bits`, and optionally the
    experts that each layer chose.

    Keys are stored transposed: the products of a decode step then contract a dimension that is not
    the last one of the cache, which XLA on CPU runs fastest.
    """

    keys: jax.Array  # [L, B, K, head_dim, S]
    values: jax.Array  # [L, B, K, S, head_dim]
    experts: jax.Array | None = None  # [L, B, S, k], of the smallest unsigned dtype

    @property
    def slots(self) -> int:
        """The number of tokens S that fit in a row."""
        return self.values.shape[-2]


@functools.partial(jax.jit, static_argnames=("model", "precision", "record_experts"))
def prefill(
    params: Params,
    tokens: jax.Array,
    pad: jax.Array,
    *,
    model: Model,
    precision: Precision,
    record_experts: bool,
) -> tuple[Cache, jax.Array]:
    """Runs prompts through the decoder.

    Args:
      params: in `precision.compute`.
      tokens: i32[B, S] prompts, padded on the left.
      pad: i32[B] padding tokens per row.
      model: the decoder.
      precision: see `sampler_precision`.
      record_experts: whether the cache records experts, here and in `decode_step`; only for a model
        with experts.

    Returns:
      The cache with S slots, and the next-token logits [B, V] in `precision.logits`.
    """
    config = model.config
    slots = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    positions = jnp.maximum(slots - pad[:, None], 0)
    segments = (slots >= pad[:, None]).astype(jnp.int32)
    table = rope_table(positions, rope=config.rope, head_dim=config.head_dim, precision=precision)

    def body(x, scanned):
        layer, window = scanned
        q, k, v = project_qkv(x, layer, table, config=config, precision=precision)
        out = attention(q, k, v, segments, window=window, precision=precision)
        x, routing = _finish_layer(x, out, layer, model=model, precision=precision)
        return x, _entries(k, v, precision, routing=routing if record_experts else None)

    x = embed(params["embed"], tokens, precision=precision)
    x, cache = lax.scan(body, x, (params["layers"], _windows(model)))
    return cache, _logits(params, x[:, -1:], model=model, precision=precision)


def decode_step(
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    *,
    slot: jax.Array,
    pad: jax.Array,
    model: Model,
    precision: Precision,
) -> tuple[Cache, jax.Array]:
    """Runs one more token of every row through the decoder.

    Args:
      params: in `precision.compute`.
      cache: holds the earlier tokens in the slots before `slot`.
      tokens: i32[B].
      slot: i32[], the slot of the tokens.
      pad: i32[B] unused slots at the start of each row.
      model: the decoder.
      precision: see `sampler_precision`.

    Returns:
      The cache with the tokens, and the next-token logits [B, V] in `precision.logits`.
    """
    config = model.config
    index = jnp.arange(cache.slots, dtype=jnp.int32)[None, :]
    seen = (index >= pad[:, None]) & (index <= slot)
    positions = (slot - pad)[:, None]
    table = rope_table(positions, rope=config.rope, head_dim=config.head_dim, precision=precision)

    # The cache is carried and written in place: scanned over, it would be copied as a whole.
    def body(carry, scanned):
        x, cache = carry
        number, layer, window = scanned
        layer = jax.tree.map(lambda bits: from_bits(bits, precision.compute), layer)
        q, k, v = project_qkv(x, layer, table, config=config, precision=precision)
        new = _entries(k, v, precision)
        keys = lax.dynamic_update_slice(cache.keys, new.keys[None], (number, 0, 0, 0, slot))
        values = lax.dynamic_update_slice(cache.values, new.values[None], (number, 0, 0, slot, 0))
        near = seen if window is None else seen & (index > slot - window)
        own = (from_bits(part[number], precision.compute) for part in (keys, values))
        out = attend(q, *own, seen=near, precision=precision)
        x, routing = _finish_layer(x, out, layer, model=model, precision=precision)
        experts = cache.experts
        if experts is not None and routing is not None:
            chosen = routing.experts.astype(experts.dtype)
            experts = lax.dynamic_update_slice(experts, chosen[None], (number, 0, slot, 0))
        return (x, Cache(keys, values, experts)), None

    x = from_bits(to_bits(params["embed"])[tokens[:, None]], params["embed"].dtype)
    x = x.astype(precision.activations)
    numbers = jnp.arange(config.num_layers, dtype=jnp.int32)
    scanned = (numbers, jax.tree.map(to_bits, params["layers"]), _windows(model))
    (x, cache), _ = lax.scan(body, (x, cache), scanned)
    return cache, _logits(params, x, model=model, precision=precision)


def attend(
    q: jax.Array, keys: jax.Array, values: jax.Array, *, seen: jax.Array, precision: Precision
) -> jax.Array:
    """Computes grouped-query attention of one token per row over the row's cache.

    Args:
      q: [B, 1, H, hd].
      keys: [B, K, hd, S].
      values: [B, K, S, hd].
      seen: bool[B, S] slots to attend to, at least one per row.
      precision: scores and softmax are in `accumulate`.

    Returns:
      [B, 1, H * hd] in `precision.activations`.
    """
    batch, _, heads, dim = q.shape
    q = q.reshape(batch, keys.shape[1], -1, dim).astype(precision.compute)
    scores = _batched_dot(q, keys.astype(precision.compute), precision) * dim**-0.5
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(scores.dtype).min)
    probs = jax.nn.softmax(scores, axis=-1).astype(precision.compute)
    out = _batched_dot(probs, values.astype(precision.compute), precision)
    return out.reshape(batch, 1, heads * dim).astype(precision.activations)


def _finish_layer(
    x: jax.Array, attended: jax.Array, layer: Layer, *, model: Model, precision: Precision
) -> tuple[jax.Array, Routing | None]:
    """Adds the attention's output and the feed-forward block to the residual stream [B, T, D]."""
    x = x + matmul(attended.reshape(*x.shape[:2], -1), layer["o"], precision=precision)
    more, routing = feed_forward(
        x, layer, config=model.config, precision=precision, local=model.local
    )
    return x + more, routing


def _entries(
    k: jax.Array, v: jax.Array, precision: Precision, *, routing: Routing | None = None
) -> Cache:
    """Returns one layer's part of the cache from keys and values [B, T, K, hd]."""
    k, v = (to_bits(x.astype(precision.compute)) for x in (k, v))
    experts = None
    if routing is not None:
        experts = routing.experts.astype(np.min_scalar_type(routing.probs.shape[-1] - 1))
    return Cache(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), experts)


def _batched_dot(x: jax.Array, y: jax.Array, precision: Precision) -> jax.Array:
    dims = (((3,), (2,)), ((0, 1), (0, 1)))
    return lax.dot_general(x, y, dims, preferred_element_type=precision.accumulate)


def _windows(model: Model) -> jax.Array | None:
    far = jnp.iinfo(jnp.int32).max // 2  # slot - far must not overflow
    windows = [far if w is None else w for w in model.config.windows]
    return jnp.array(windows, jnp.int32) if windows else None


def _logits(params: Params, x: jax.Array, *, model: Model, precision: Precision) -> jax.Array:
    """Returns the logits [B, V] of a residual stream [B, 1, D]."""
    config = model.config
    x = rms_norm(x, params["final_norm"], eps=config.rms_norm_eps, precision=precision)
    head = model.unembedding(params).astype(precision.compute)
    logits = lax.dot_general(
        x[:, 0].astype(precision.compute),
        head,
        (((1,), (1,)), ((), ())),
        preferred_element_type=precision.accumulate,
    )
    return logits.astype(precision.logits)
