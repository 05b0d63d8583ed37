"""One decoder for all families: a scan over the stacked layers of each group, so that the size of
the compiled program does not depend on their number."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch
from jaxrl.core.precision import Precision
from jaxrl.core.runs import Runs
from jaxrl.models.attention.blocks import KEPT, Attend, attention
from jaxrl.models.attention.cudnn import keeping
from jaxrl.models.attention.kernels import rounds_scaled_keys
from jaxrl.models.attention.visible import Tree
from jaxrl.models.block import block
from jaxrl.models.components import Group
from jaxrl.models.experts import Routing, imbalance
from jaxrl.models.families import DecoderConfig
from jaxrl.models.layers import (
    Constrain,
    Layer,
    LayerContext,
    Local,
    embed,
    identity,
    in_order,
    scan_layers,
    undivided,
)
from jaxrl.models.linear_attention import NOT_SHARED, recur_rows
from jaxrl.models.lora import attach, axes_of, frozen, head_adapter, output_layer, trainable
from jaxrl.models.output_layer import Head
from jaxrl.models.parameters import param_specs
from jaxrl.models.products import OUTPUT, matmul
from jaxrl.models.row_parts import Rows
from jaxrl.models.spec import Params, Specs
from jaxrl.sharding.gradients import GradientSum
from jaxrl.sharding.partition import Layout


class Hidden(Protocol):
    """The decoder without its head."""

    def __call__(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        segments: jax.Array,
        *,
        precision: Precision,
        seen_until: jax.Array | None = None,
        runs: Runs | None = None,
    ) -> jax.Array:
        """Computes the residual stream after the final norm, [B, T, D] in `precision.activations`.

        `tokens`, `positions` (within the segment) and `segments` (0: padding) are i32[B, T]. Rows
        whose sequences share prefixes also need `seen_until`, see `visible.Tree`; `runs` is that of
        `TokenBatch`. The caller casts `params` to `precision.compute` once per step; other dtypes
        are cast here. `params` may be `lora.Adapted`. With an adapter of the output layer the
        result is [B, T, D + rank], see `Head`.
        """
        ...


class Routed(NamedTuple):
    """Hidden states of a decoder with experts, and its routing."""

    hidden: jax.Array  # as `Hidden` returns it
    imbalance: jax.Array  # f32[B, T], see `experts.imbalance`; mean over layers
    experts: jax.Array  # i32[B, T, L, k], the experts chosen in each layer that has some


class Model(NamedTuple):
    """A model as the learner and the sampler use it; hashable.

    `hidden_routed` takes the arguments of `hidden` and `recorded`, experts to replay:
    i32[B, T, L, k], negative for a token without (see `experts.mixture`).

    The learner computes log-probs at `temperature`. Set it to the temperature of sampling with
    `model._replace(temperature=0.7)`.
    """

    config: DecoderConfig
    specs: Specs
    hidden: Hidden
    unembedding: Callable[[Params], jax.Array]  # the head [V, D], tied or not; a scorer's [1, D]
    hidden_routed: Callable[..., Routed] | None = None  # None for a dense decoder
    local: Local = undivided
    temperature: float = 1.0
    gather: Constrain = identity
    rows: Rows = Rows()
    head_adapter: Callable[[Params], jax.Array | None] = lambda _: None  # see `Head.adapter`

    def hidden_of(
        self, params: Params, batch: TokenBatch, *, precision: Precision | str
    ) -> jax.Array:
        """Computes `hidden` of the tokens of a batch."""
        return self.hidden(
            params,
            batch.tokens,
            batch.positions,
            batch.segments,
            precision=Precision.of(precision),
            seen_until=batch.seen_until,
            runs=batch.runs,
        )

    def head(self, params: Params) -> Head:
        """Returns the output layer of a language model."""
        head = Head(self.unembedding(params), self.config.logit_cap, self.temperature)
        return head._replace(adapter=self.head_adapter(params))

    def gathered_head(self, params: Params) -> Head:
        """Returns `head` as the learner uses it: gathered once for all chunks of positions."""
        head = self.head(params)
        weights, adapter = self.gather(head.weights, ("vocab", "embed")), head.adapter
        if adapter is not None:
            adapter = self.gather(adapter, ("vocab", "rank"))
        return head._replace(weights=weights, rows=self.rows, adapter=adapter)

    def __hash__(self) -> int:  # the specs are a dict and follow from the config
        return hash((self.config, self.hidden))


_policies = jax.checkpoint_policies

# Results kept for the backward pass; the rest is recomputed.
_REMAT: dict[str, Callable[..., Any]] = {
    # On a mesh, where it would keep gathered weights.
    "none": lambda primitive, *_, **__: primitive.name != "sharding_constraint",
    "matmuls": keeping(_policies.save_only_these_names(OUTPUT, KEPT)),
    "attention": keeping(_policies.save_only_these_names(KEPT)),
    "layer": _policies.nothing_saveable,
}


@functools.cache  # equal models share compiled programs
def decoder(
    config: DecoderConfig,
    *,
    remat: str = "none",
    layout: Layout | None = None,
    attend: Attend = attention,
) -> Model:
    """Builds a decoder-only transformer.

    Args:
      config: its family and sizes.
      remat: the results that the backward pass recomputes. "none": nothing. "matmuls": norms, rope
        and other cheap operations; outputs of projections and attention are kept. This takes less
        than half of the memory and is the fastest on CPU, because less is written. "attention":
        everything but attention. "layer": everything; only each layer's input is kept.
      layout: placement on the devices of the learner; None for a single device.
      attend: attention, see `kernels.attend_by`.

    Raises:
      ValueError: for an unknown `remat`.
    """
    if remat not in _REMAT:
        raise ValueError(f"remat={remat!r}; expected one of {', '.join(_REMAT)}")
    own = _Decoder(config, param_specs(config), remat, layout, attend)

    def hidden(params, tokens, positions, segments, *, precision, seen_until=None, runs=None):
        return own.run(params, tokens, (positions, segments, seen_until, runs), precision)[0]

    def hidden_routed(
        params, tokens, positions, segments, *, precision, seen_until=None, runs=None, recorded=None
    ):
        recorded = None if recorded is None else recorded.transpose(2, 0, 1, 3)
        rows = (positions, segments, seen_until, runs)
        x, (costs, chosen) = own.run(
            params, tokens, rows, precision, routed=True, recorded=recorded
        )
        return Routed(x, jnp.mean(costs, axis=0), chosen.transpose(1, 2, 0, 3))

    def unembedding(params):
        if config.scored:
            return trainable(params)["score"]
        return output_layer(frozen(params))

    routed = None if config.experts is None else hidden_routed
    found = Model(config, own.specs, hidden, unembedding, routed, head_adapter=head_adapter)
    if layout is None:
        return found
    return found._replace(local=layout.local, gather=layout.gather, rows=Rows(layout))


class _Decoder(NamedTuple):
    config: DecoderConfig
    specs: Specs
    remat: str
    layout: Layout | None
    attend: Attend

    def run(self, params, tokens, rows, precision, *, routed=False, recorded=None):
        """Computes `Hidden`, and what was observed of each layer's routing if `routed`."""
        config, layout = self.config, self.layout
        positions, segments, seen_until, runs = rows
        params = attach(params)
        _check_linear(config, precision, shared=seen_until is not None)
        config.check_blocks(precision.blocks)
        _check_undivided(layout, precision)
        seen = segments if seen_until is None else Tree(seen_until, positions)
        context = self.context(seen, tokens.shape[1], precision)
        tables = context.rope_tables(positions)
        gathers = layout is not None and layout.mesh.size > 1
        # A loop over layers has XLA for GPUs copy weights and results, a seventh of a step's time.
        # On a mesh it bounds the weights that are gathered at once.
        unroll = layout is not None and not gathers and Rows(layout).platform == "gpu"

        def layer_of(group, x, layer, replay):
            x, layer = _in_turn(x, layer, config)
            own = context
            if layout is not None and gathers:
                axes = {k: axes_of(k, self.specs[group.name]) for k in layer}
                layer = {k: layout.gather(v, axes[k]) for k, v in layer.items()}
                own = context._replace(gradients=_gradients(axes, layout, precision))

            def attention_of(q, k, v):
                scoring = context.scoring(group, layer)
                inside = precision.inside("softmax")
                out = self.attend(q, k, v, seen, scoring=scoring, precision=inside, runs=runs)
                return out, None

            def recurrence_of(inputs, gates):
                return recur_rows(inputs, gates, layer, segments, context=context)[0], None

            table, mix = tables[group.kind.rope], recurrence_of if group.linear else attention_of
            x, _, routing = block(x, layer, mix, table=table, context=own, recorded=replay)
            return x, _observed(routing, segments) if routed and routing is not None else None

        if self.remat != "none" or gathers:
            layer_of = jax.checkpoint(
                layer_of,
                policy=_REMAT[self.remat],
                prevent_cse=unroll or _periodic(config),
                static_argnums=(0,),
            )

        table = params["embed"]
        if layout is not None and precision.sums == "fixed":  # a lookup in parts is a sum of parts
            table = layout.gather(table, ("vocab", "embed"))
        x = context.enter(embed(table, tokens, precision=precision))
        x = context.constrain(x, ("batch", "length", "embed"))
        x, kept = scan_layers(
            layer_of,
            x,
            params,
            config,
            inputs=lambda group: (_replayed(recorded, group, config),),
            unroll=unroll,
        )
        x = context.norm(x, params["final_norm"])
        x = context.constrain(x, ("batch", "length", "embed"))
        if "head_a" in params:
            more = matmul(x, params["head_a"], precision=precision)
            x = jnp.concatenate([x, more], axis=-1)
        return x, in_order(kept)

    def context(self, seen: Any, length: int, precision: Precision) -> LayerContext:
        """Returns the settings of the layers for rows of `length` tokens on the layout's devices,
        and of these segments or `Tree`."""
        config, layout = self.config, self.layout
        if layout is None:
            return LayerContext(config, precision)
        platform = layout.mesh.devices.flat[0].platform
        inside, scaled = precision.inside("softmax"), False
        if platform == "tpu" and config.latent is None:
            scaled = rounds_scaled_keys(self.attend, seen, length, inside)
        return LayerContext(
            config,
            precision,
            layout.constrain,
            layout.local,
            by_heads=platform == "tpu",
            key_factor=config.score_scale if scaled else 1.0,
            # Of one token XLA computes what a kernel of many does, in another order.
            on_gpu=platform == "gpu" and precision.sums == "any",
        )


def _gradients(
    axes: Mapping[str, tuple[str, ...]], layout: Layout, precision: Precision
) -> dict[str, GradientSum]:
    """Returns the sums over devices of the gradients of a layer's matrices, given the logical axes
    of all its parameters. With fixed sums XLA's remain, as devices add in its order there."""
    sums = {k: GradientSum(layout, own) for k, own in axes.items() if len(own) == 2}
    return {k: one for k, one in sums.items() if precision.sums == "any" and one.possible}


def _periodic(config: DecoderConfig) -> bool:
    return any(len(groups) > 1 for groups in config.scans)


def _in_turn(x: jax.Array, layer: Layer, config: DecoderConfig) -> tuple[jax.Array, Layer]:
    """Makes a layer's weights wait for the stream. The layers of a period share a loop's body:
    without a barrier, XLA would gather all their weights before the first is needed."""
    return jax.lax.optimization_barrier((x, layer)) if _periodic(config) else (x, layer)


def _check_linear(config: DecoderConfig, precision: Precision, *, shared: bool) -> None:
    if shared and config.linear is not None:
        raise ValueError(
            f"rows of shared prompts are not supported for {config.model_type}: {NOT_SHARED}"
        )


def _check_undivided(layout: Layout | None, precision: Precision) -> None:
    """Checks that no device has a part of a sum whose order is fixed.

    Raises:
      ValueError: if the layout cuts what products sum over, or the results of a sum.
    """
    cut = None if layout is None or precision.sums == "any" else layout.divided
    if cut is not None:
        raise ValueError(
            f"sums=fixed, but the layout divides {cut[0]!r} over the mesh's {' x '.join(cut[1])}; "
            "build it with sharding.by_rows(rules)"
        )


def _replayed(recorded: jax.Array | None, group: Group, config: DecoderConfig) -> jax.Array | None:
    """Selects a group's experts from `recorded` [L, B, T, k], which has all routed layers; None if
    there is nothing to replay."""
    if recorded is None or not group.routed:
        return None
    first = group.first - config.num_layers + config.routed_layers
    return recorded[first : first + group.count * group.step : group.step]


def _observed(routing: Routing, segments: jax.Array) -> tuple[jax.Array, jax.Array]:
    return imbalance(routing, segments), routing.experts
