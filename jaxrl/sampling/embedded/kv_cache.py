"""The decoder with a KV cache: prefill of prompts, and steps of one or several tokens per row.

The slot of a token is its position. A row of the cache thus has the form of a learner's row, and
attention adds the same numbers in the same order.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl.core.compiled import jit_by_precision
from jaxrl.core.half_bits import from_bits, to_bits
from jaxrl.core.precision import Precision
from jaxrl.models.adapter_rows import AdapterRows, SortedRows
from jaxrl.models.attention.blocks import attention
from jaxrl.models.block import block
from jaxrl.models.experts import Routing
from jaxrl.models.layers import OWN, Layer, LayerContext, embed, in_order, scan_layers, with_adapter
from jaxrl.models.linear_attention import LinearState, last_inputs, recur_rows, recur_token
from jaxrl.models.model import Model
from jaxrl.models.output_layer import rounded_logits
from jaxrl.models.products import matmul, product
from jaxrl.models.spec import Params
from jaxrl.sampling.embedded.cache import Cache, attend_cache, cache_entries, write_entries

CHUNK = 64  # tokens of a row that `extend` runs together


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
    own: AdapterRows | None = None,
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
      own: the adapter of each row, if rows have their own (`layers.OWN`).

    Returns:
      The cache with S slots, and the next-token logits [B, V] in `precision.logits`.
    """
    config = model.config
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    segments = (positions < lengths[:, None]).astype(jnp.int32)
    context = LayerContext(config, precision, local=model.local)
    tables = context.rope_tables(positions)
    sorted_rows = None if own is None else own.sorted()

    def layer_of(group, x, layer):
        def attend(q, k, v):
            scoring = context.scoring(group, layer)
            out = attention(q, k, v, segments, scoring=scoring, precision=precision)
            return out, cache_entries(k, v, context, for_cpu=for_cpu)

        def recur(inputs, gates):
            out, states = recur_rows(inputs, gates, layer, segments, context=context)
            last = last_inputs(inputs, lengths, width=layer["conv"].shape[-1] - 1)
            return out, LinearState(last, states)

        table, mix = tables[group.kind.rope], recur if group.linear else attend
        x, kept, routing = block(x, _of_rows(layer, sorted_rows), mix, table=table, context=context)
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
    return cache, _logits(params, last, own=sorted_rows, model=model, context=context)


def decode_step(
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    *,
    positions: jax.Array,
    model: Model,
    precision: Precision,
    own: SortedRows | None = None,
) -> tuple[Cache, jax.Array]:
    """Runs one more token of every row, i32[B], at its position, i32[B], through the decoder; the
    cache holds the earlier ones. For the other arguments see `prefill`.

    Returns:
      The cache with the tokens, and the next-token logits [B, V] in `precision.logits`.
    """
    context = LayerContext(model.config, precision, local=model.local)
    at = positions[:, None]
    cache, x = _advance(params, cache, tokens[:, None], at, context=context, own=own)
    return cache, _logits(params, x, own=own, model=model, context=context)


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
    return cache, _logits(params, last, own=None, model=model, context=context)


def _of_rows(layer: Layer, own: SortedRows | None) -> Layer:
    """Adds the rows of each adapter to a layer's parameters."""
    return layer if own is None else {**layer, OWN: own}


def _advance(
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    positions: jax.Array,
    *,
    context: LayerContext,
    own: SortedRows | None = None,
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
            new = cache_entries(k, v, context, for_cpu=cache.for_cpu)
            changed = write_entries(cache, new, place, (rows, positions))
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


def _smallest(routing: Routing) -> jax.Array:
    """Returns the chosen experts in the smallest unsigned dtype."""
    return routing.experts.astype(np.min_scalar_type(routing.probs.shape[-1] - 1))


def _logits(
    params: Params, x: jax.Array, *, own: SortedRows | None, model: Model, context: LayerContext
) -> jax.Array:
    """Returns the logits [B, V] of a residual stream [B, 1, D]; adapters of the output layer are
    beside it, as those of layers are."""
    x = context.norm(x, params["final_norm"])[:, 0]
    head, precision = model.head(params), context.precision
    products = product(x, head.weights, contract=(1, 1), precision=precision)
    if head.adapter is not None:
        wide = dataclasses.replace(precision, activations=precision.accumulate)

        def adapter(x: jax.Array, layer: Layer) -> jax.Array:
            inner = matmul(x, layer["head_a"], precision=precision)
            return matmul(inner, layer["head_b"], precision=wide)

        products += with_adapter(adapter, x, _of_rows(params, own), "head")
    return rounded_logits(products, head, precision=precision)
