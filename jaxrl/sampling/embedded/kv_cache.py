"""The decoder with a KV cache: prefill of prompts, and steps of one or several tokens per row.

The slot of a token is its position. A row of the cache thus has the form of a learner's row, and
attention adds the same numbers in the same order.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxrl.core.compiled import jit_by_precision
from jaxrl.core.half_bits import from_bits, to_bits
from jaxrl.core.precision import Precision
from jaxrl.models.attention.blocks import TILE, attention, pad_values, softmax_product
from jaxrl.models.attention.scores import Scoring
from jaxrl.models.block import block
from jaxrl.models.experts import Routing
from jaxrl.models.layers import OWN, Layer, LayerContext, embed, in_order, scan_layers
from jaxrl.models.linear_attention import LinearState, last_inputs, recur_rows, recur_token
from jaxrl.models.logprobs import rounded_logits
from jaxrl.models.model import Model
from jaxrl.models.products import ADDED, product
from jaxrl.models.spec import Params
from jaxrl.sampling.embedded import cache_kernel

CHUNK = 64  # tokens of a row that `extend` runs together


@struct.dataclass
class Cache:
    """Keys and values of L layers, B rows and S slots, in the form of `to_bits`, the states of N
    linear layers, and optionally the experts that each layer chose.

    Keys are stored transposed for a CPU: XLA runs the products of a decode step fastest there if
    they do not contract the cache's last dimension. For a TPU XLA moves the dimensions that are
    written together to the end, and would copy a transposed cache to write a token.
    """

    # [L, B, K, head_dim, S] for a CPU, else [L, B, K, S, head_dim]. In the absorbed form of
    # `latent`, K is 1.
    keys: jax.Array
    # [L, B, K, S, value_dim], see `pad_values`; None in the absorbed form, where they are the keys.
    values: jax.Array | None
    # [L, B, S, k] of the layers with experts, in the smallest unsigned dtype.
    experts: jax.Array | None = None
    linear: LinearState | None = None  # its arrays have the layers in front: [N, B, ...]
    for_cpu: bool = struct.field(pytree_node=False, default=True)

    @property
    def rows(self) -> int:
        """The number of rows B."""
        return self.keys.shape[1]

    @property
    def slots(self) -> int:
        """The number of tokens S that fit in a row."""
        return self.keys.shape[-1 if self.for_cpu else -2]


@jit_by_precision(static_argnames=("model", "precision", "record_experts", "for_cpu"))
def prefill(
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    model: Model,
    precision: Precision,
    record_experts: bool,
    for_cpu: bool = True,
    own: jax.Array | None = None,
) -> tuple[Cache, jax.Array]:
    """Runs prompts through the decoder.

    Args:
      params: in `precision.compute`.
      tokens: i32[B, S] prompts, padded on the right.
      lengths: i32[B] tokens of each prompt, at least 1.
      model: the decoder.
      precision: see `sampler_precision`.
      record_experts: True to record experts, here and in `decode_step`; only for a model with them.
      for_cpu: the form of the cache.
      own: bool[B, rank], the ranks of joined adapters that belong to each row (`layers.OWN`).

    Returns:
      The cache with S slots, and the next-token logits [B, V] in `precision.logits`.
    """
    config = model.config
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    context = LayerContext(config, precision, local=model.local)
    tables = context.rope_tables(positions)

    def layer_of(group, x, layer):
        def attend(q, k, v):
            scoring = context.scoring(group, layer)
            out = attention(q, k, v, segments, scoring=scoring, precision=precision)
            return out, _entries(k, v, context, for_cpu=for_cpu)

        def recur(inputs, gates):
            out, states = recur_rows(inputs, gates, layer, segments, context=context)
            last = last_inputs(inputs, lengths, width=layer["conv"].shape[-1] - 1)
            return out, LinearState(last, states)

        table, mix = tables[group.kind.rope], recur if group.linear else attend
        x, kept, routing = block(x, _of_rows(layer, own), mix, table=table, context=context)
        entries, state = (None, kept) if group.linear else (kept, None)
        chosen = _smallest(routing) if record_experts and routing is not None else None
        return x, (entries, state, chosen)

    x = context.enter(embed(params["embed"], tokens, precision=precision))
    x, kept = scan_layers(layer_of, x, params, config)
    entries, linear, experts = (
        in_order([[(group, parts[i]) for group, parts in scan] for scan in kept]) for i in range(3)
    )
    cache = dataclasses.replace(entries, linear=linear, experts=experts)
    last = jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)
    return cache, _logits(params, last, model=model, context=context)


def decode_step(
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    *,
    positions: jax.Array,
    model: Model,
    precision: Precision,
    own: jax.Array | None = None,
) -> tuple[Cache, jax.Array]:
    """Runs one more token of every row, i32[B], at its position, i32[B], through the decoder; the
    cache holds the earlier ones. For the other arguments see `prefill`.

    Returns:
      The cache with the tokens, and the next-token logits [B, V] in `precision.logits`.
    """
    context = LayerContext(model.config, precision, local=model.local)
    at = positions[:, None]
    cache, x = _advance(params, cache, tokens[:, None], at, context=context, own=own)
    return cache, _logits(params, x, model=model, context=context)


@jit_by_precision(static_argnames=("model", "precision"), donate_argnames=("cache",))
def extend(
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    *,
    starts: jax.Array,
    lengths: jax.Array,
    model: Model,
    precision: Precision,
) -> tuple[Cache, jax.Array]:
    """Runs more tokens of every row through the decoder, in chunks of CHUNK tokens.

    Args:
      params: in `precision.compute`.
      cache: holds every row's tokens before `starts`; later ones are ignored.
      tokens: i32[B, T], padded on the right to a multiple of CHUNK.
      starts: i32[B], position of each row's first token.
      lengths: i32[B], number of tokens of each row to run, at least 1.
      model: a decoder without linear layers, whose states would include tokens after `starts`.
      precision: see `sampler_precision`.

    Returns:
      The cache with the tokens, and the logits [B, V] after the last one of each row, in
      `precision.logits`.
    """
    context = LayerContext(model.config, precision, local=model.local)
    offsets = jnp.arange(CHUNK, dtype=jnp.int32)[None, :]

    def more(carry):
        done, _, _ = carry
        return done < jnp.max(lengths)

    def step(carry):
        done, cache, last = carry
        part = lax.dynamic_slice_in_dim(tokens, done, CHUNK, axis=1)
        # Padding has no slot, so it is not written.
        positions = jnp.where(
            done + offsets < lengths[:, None], starts[:, None] + done + offsets, cache.slots
        )
        cache, x = _advance(params, cache, part, positions, context=context)
        ends = lengths - 1 - done
        here = jnp.take_along_axis(x, jnp.clip(ends, 0, CHUNK - 1)[:, None, None], axis=1)
        last = jnp.where(((ends >= 0) & (ends < CHUNK))[:, None, None], here, last)
        return done + CHUNK, cache, last

    empty = jnp.zeros((len(tokens), 1, model.config.hidden_size), precision.activations)
    _, cache, last = lax.while_loop(more, step, (jnp.int32(0), cache, empty))
    return cache, _logits(params, last, model=model, context=context)


def _of_rows(layer: Layer, own: jax.Array | None) -> Layer:
    """Adds the ranks of each row to a layer's parameters."""
    return layer if own is None else {**layer, OWN: own}


def _advance(
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    *,
    context: LayerContext,
    own: jax.Array | None = None,
) -> tuple[Cache, jax.Array]:
    """Runs i32[B, T] tokens at i32[B, T] positions through the layers; T is 1 with linear layers.
    Positions beyond the cache's slots are not kept.

    Returns:
      The cache with the tokens, and the residual stream [B, T, D].
    """
    config, precision = context.config, context.precision
    tables = context.rope_tables(positions)
    rows = jnp.arange(len(tokens))[:, None]

    # The cache is carried and written in place: scanned over, it would be copied as a whole.
    def layer_of(group, carry, layer, number, place):
        x, cache = carry
        layer = jax.tree.map(lambda x: from_bits(x, precision.compute), layer)
        scoring = context.scoring(group, layer)

        def attend(q, k, v):
            new = _entries(k, v, context, for_cpu=cache.for_cpu)
            changed = _write(cache, new, place, (rows, positions))
            out = attend_cache(
                q, changed, place, positions=positions, scoring=scoring, context=context
            )
            return out[..., : v.shape[-1]], changed

        def recur(inputs, gates):
            state = jax.tree.map(lambda part: part[place], cache.linear)
            out, state = recur_token(inputs, gates, layer, state, context=context)
            linear = jax.tree.map(lambda x, new: x.at[place].set(new), cache.linear, state)
            return out, dataclasses.replace(cache, linear=linear)

        table, mix = tables[group.kind.rope], recur if group.linear else attend
        x, cache, routing = block(x, _of_rows(layer, own), mix, table=table, context=context)
        if cache.experts is not None and routing is not None:
            routed = number - config.num_layers + config.routed_layers
            chosen = _smallest(routing)
            experts = cache.experts.at[routed, rows, positions].set(chosen, mode="drop")
            cache = dataclasses.replace(cache, experts=experts)
        return (x, cache), None

    def moved(x):  # on CPU only: other compilers copy weights to change their type
        return to_bits(x) if cache.for_cpu else x

    x = context.enter(from_bits(moved(params["embed"])[tokens], params["embed"].dtype))

    def numbers(group):
        return tuple(jnp.array(n, jnp.int32) for n in (group.layers, config.cache_places(group)))

    stacked = {name: jax.tree.map(moved, part) for name, part in params.items()}
    (x, cache), _ = scan_layers(layer_of, (x, cache), stacked, config, inputs=numbers)
    return cache, x


def attend_cache(
    q: jax.Array,
    cache: Cache,
    place: jax.Array,
    *,
    positions: jax.Array,
    scoring: Scoring,
    context: LayerContext,
) -> jax.Array:
    """Computes grouped-query attention of T tokens per row over the row's cache, with the
    arithmetic of `attention`. Slots hidden by the window are not read. A single token of each row
    has a kernel on an NVIDIA GPU.

    Args:
      q: [B, T, H, hd].
      cache: holds the tokens up to `positions`.
      place: i32[], index of the layer in the cache.
      positions: i32[B, T], consecutive in each row; results at padding are arbitrary.
      scoring: the window, scale, cap and sinks of the scores.
      context: its precision has scores and softmax in `accumulate`.

    Returns:
      [B, T, H, vd] in `precision.activations`.
    """
    own: Any = {"scoring": scoring, "precision": context.precision}
    plain = functools.partial(_attend_plain, **own)
    alone = q.shape[1] == 1 and cache.values is not None and not cache.for_cpu
    if not alone or not cache_kernel.computes(context.precision):
        return plain(q, cache, place, positions)

    def kernel(q, cache, place, positions):
        held = cache.keys, cache.values
        return cache_kernel.attend(q, *held, place, positions, **own, local=context.local)

    return lax.platform_dependent(q, cache, place, positions, cuda=kernel, default=plain)


def _attend_plain(q, cache, place, positions, *, scoring, precision):
    batch, length, heads, dim = q.shape
    kv_heads, window = cache.keys.shape[2], scoring.window
    groups = heads // kv_heads
    first, keys, values = _near_slots(cache, place, positions, window, precision=precision)
    index = first[:, None, None] + jnp.arange(values.shape[2], dtype=jnp.int32)[None, None, :]
    seen = index <= positions[:, :, None]
    if window is not None:
        seen &= index > positions[:, :, None] - window
    q = q.reshape(batch, length, kv_heads, groups, dim).transpose(0, 2, 3, 1, 4)
    # The queries of all tokens and heads that share keys are rows of one matrix.
    q = q.reshape(batch, kv_heads, groups * length, dim)
    contract = (3, 2 if cache.for_cpu else 3)
    scores = product(q, keys, contract=contract, batch=(0, 1), precision=precision)
    scores = scoring.scores(scores)
    seen = jnp.broadcast_to(seen[:, None, None], (batch, 1, groups, *seen.shape[1:]))
    seen = seen.reshape(batch, 1, groups * length, -1)
    scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
    sinks = scoring.sink_scores(kv_heads=kv_heads, ndim=4, dtype=precision.accumulate)
    if sinks is not None:
        sinks = jnp.repeat(sinks, length, axis=2)
    out, _ = softmax_product(scores, values, sinks, precision=precision)
    out = out.reshape(batch, kv_heads, groups, length, -1).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, length, heads, -1)


def _near_slots(
    cache: Cache,
    place: jax.Array,
    positions: jax.Array,
    window: int | None,
    *,
    precision: Precision,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Reads the slots of a layer that the tokens of each row may see.

    Returns:
      i32[B] the first slot; keys and values of N slots, in the cache's form.
    """
    rows, slots = len(positions), cache.slots
    # At multiples of `step` products add the keys in the same order as from slot 0.
    step = ADDED if precision.sums == "fixed" else TILE
    back = slots if window is None else window - 1
    near = slots - (slots - back - positions.shape[1] - step + 1) // step * step
    first = jnp.zeros(rows, jnp.int32)
    if near < slots:
        first = jnp.clip((positions[:, 0] - back) // step * step, 0, slots - near)

    def read(part: jax.Array, *, axis: int) -> jax.Array:
        if near >= slots:
            return from_bits(part[place], precision.compute)
        sizes = [near if i == axis else size for i, size in enumerate(part.shape)]

        def of_row(row: jax.Array, first: jax.Array) -> jax.Array:
            starts = [first if i == axis else 0 for i in range(part.ndim)]
            starts[:2] = place, row
            return lax.dynamic_slice(part, starts, (1, 1, *sizes[2:]))[0, 0]

        found = jax.vmap(of_row)(jnp.arange(rows, dtype=jnp.int32), first)
        return from_bits(found, precision.compute)

    keys = read(cache.keys, axis=4 if cache.for_cpu else 3)
    if cache.values is None:
        values = keys.swapaxes(2, 3) if cache.for_cpu else keys
        return first, keys, pad_values(values, precision)
    return first, keys, read(cache.values, axis=3)


def _entries(k: jax.Array, v: jax.Array, context: LayerContext, *, for_cpu: bool) -> Cache:
    """Returns one layer's part of the cache from keys and values [B, T, K, hd]."""
    precision = context.precision
    k, v = (to_bits(x.astype(precision.compute)) for x in (k, v))
    keys = k.transpose(0, 2, 3, 1) if for_cpu else k.transpose(0, 2, 1, 3)
    if context.absorbed:
        return Cache(keys, None, for_cpu=for_cpu)
    values = pad_values(v.transpose(0, 2, 1, 3), precision)
    return Cache(keys, values, for_cpu=for_cpu)


def _write(
    cache: Cache, new: Cache, place: jax.Array, tokens: tuple[jax.Array, jax.Array]
) -> Cache:
    """Writes one layer's entries for tokens, given as rows, i32[B, 1], and positions, i32[B, T]."""
    rows, positions = tokens
    heads = jnp.arange(new.keys.shape[1])[None, :, None]
    at = (place, rows[:, :, None], heads, positions[:, None, :])
    keys, values = cache.keys, cache.values
    if cache.for_cpu:
        new_keys = new.keys.transpose(0, 3, 1, 2)
        keys = keys.at[place, rows, :, :, positions].set(new_keys, mode="drop")
    else:
        keys = keys.at[at].set(new.keys, mode="drop")
    if values is not None and new.values is not None:
        if cache.for_cpu:
            new_values = new.values.transpose(0, 2, 1, 3)
            values = values.at[place, rows, :, positions].set(new_values, mode="drop")
        else:
            values = values.at[at].set(new.values, mode="drop")
    return dataclasses.replace(cache, keys=keys, values=values)


def _smallest(routing: Routing) -> jax.Array:
    """Returns the chosen experts in the smallest unsigned dtype."""
    return routing.experts.astype(np.min_scalar_type(routing.probs.shape[-1] - 1))


def _logits(params: Params, x: jax.Array, *, model: Model, context: LayerContext) -> jax.Array:
    """Returns the logits [B, V] of a residual stream [B, 1, D]."""
    x = context.norm(x, params["final_norm"])[:, 0]
    head = model.head(params)
    products = product(x, head.weights, contract=(1, 1), precision=context.precision)
    return rounded_logits(products, head, precision=context.precision)
