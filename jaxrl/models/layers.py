"""The decoder's layers as pure functions of arrays; every cast follows the `Precision`.

Matrix products take operands in `compute`, accumulate in `accumulate` and return `activations`, in
the forward and backward passes. Norms, rotary embedding and silu are computed in `accumulate`.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.core import blocks
from jaxrl.core.half_bits import with_its_bits
from jaxrl.core.precision import Precision
from jaxrl.models.attention.scores import Scoring
from jaxrl.models.components import Group
from jaxrl.models.families import DecoderConfig
from jaxrl.models.integers import int8_matmul
from jaxrl.models.products import matmul
from jaxrl.models.rope import Rope, RopeTable, rope_table
from jaxrl.sharding.gradients import GradientSum

Layer = Mapping[str, Any]  # arrays: one layer's parameters, without the "layers" dimension
# (activation, logical name of each dimension) -> the activation, its sharding constrained.
Constrain = Callable[[jax.Array, Sequence[str]], jax.Array]
# `sharding.partition.Layout.local`, which runs a function on each device's part of its arguments.
Local = Callable[..., Callable[..., jax.Array]]


def identity(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Returns an array of any shape unchanged: `Constrain` on a single device."""
    return x


def undivided(
    function: Callable[..., jax.Array], *, inputs: Sequence[Sequence[str]], output: Sequence[str]
) -> Callable[..., jax.Array]:
    """Returns the function unchanged: `Local` on a single device."""
    return function


Found = list[list[tuple[Group, Any]]]  # by scan, see `scan_layers`


def scan_layers(
    function: Callable[..., tuple[Any, Any]],
    carry: Any,
    params: Mapping[str, Any],
    config: DecoderConfig,
    *,
    inputs: Callable[[Group], tuple[Any, ...]] = lambda group: (),
    unroll: bool = False,
) -> tuple[Any, Found]:
    """Computes all layers, from first to last, in one scan for each of `config.scans`.

    Args:
      function: (group, carry, layer's parameters, *its inputs) -> (carry, kept).
      carry: passed from layer to layer, such as the residual stream.
      params: the decoder's. A group's layers are stacked, or a tuple: then each is compiled for
        itself.
      config: the decoder's.
      inputs: group -> further inputs of its layers, each stacked along the first dimension.
      unroll: True to compile each layer for itself: it takes longer, but no layer's weights are
        copied out of the stack, nor what it keeps into one.

    Returns:
      The last carry; and for each scan, the results that each group's layers kept, stacked.
    """
    found: Found = []
    for groups in config.scans:

        def body(carry, scanned, groups=groups):
            kept = []
            for group, one in zip(groups, scanned, strict=True):
                carry, more = function(group, carry, *one)
                kept.append(more)
            return carry, kept

        scanned = [(params[group.name], *inputs(group)) for group in groups]
        if isinstance(params[groups[0].name], tuple):
            carry, kept = _each_layer(body, carry, scanned)
        else:
            carry, kept = lax.scan(body, carry, scanned, unroll=unroll)
        found.append(list(zip(groups, kept, strict=True)))
    return carry, found


def _each_layer(body: Callable[..., Any], carry: Any, scanned: Sequence[Any]) -> tuple[Any, Any]:
    """Computes what a scan does where each group's layers are a tuple."""
    kept = []
    for i in range(len(scanned[0][0])):
        own = [(layers[i], *jax.tree.map(lambda x, i=i: x[i], more)) for layers, *more in scanned]
        carry, one = body(carry, own)
        kept.append(one)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *kept)


def in_order(found: Found) -> Any:
    """Joins the results that layers kept, in the order of the layers. Groups that kept nothing have
    None; the result is None if all of them do."""
    parts: list[Any] = []
    for scan in found:
        some = [kept for _, kept in scan if kept is not None]
        if len(some) > 1:  # their layers alternate
            some = [jax.tree.map(_alternated, *some)]
        parts += some
    if len(parts) < 2:
        return parts[0] if parts else None
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def _alternated(*parts: jax.Array) -> jax.Array:
    """Interleaves G arrays [N, ...]: [N * G, ...]."""
    return jnp.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])


class LayerContext(NamedTuple):
    """Settings that all layers of a forward pass share."""

    config: DecoderConfig
    precision: Precision
    constrain: Constrain = identity  # constrains the sharding of activations
    local: Local = undivided  # runs experts and kernels on the devices that hold their parts
    by_heads: bool = False  # queries, keys and values are made by `heads.arrange`
    key_factor: float = 1.0  # part of the factor of the scores that keys are multiplied by
    on_gpu: bool = False  # forms that XLA for GPUs passes over memory for once
    # By matrix of the layer: the sum over devices of its gradient, where XLA's is slower.
    gradients: Mapping[str, GradientSum] = MappingProxyType({})

    @property
    def absorbed(self) -> bool:
        """True if attention is computed in the absorbed form of `latent`."""
        return self.config.latent is not None and self.precision.latent == "absorbed"

    def norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Applies `rms_norm` as the decoder's family does."""
        weight = self.norm_weight(weight)
        return rms_norm(x, weight, eps=self.config.rms_norm_eps, precision=self.precision)

    def norm_weight(self, weight: jax.Array) -> jax.Array:
        """Returns the factors of a norm, in `accumulate`."""
        weight = weight.astype(self.precision.accumulate)
        return 1 + weight if self.config.norm_plus_one else weight

    def layer_norm(self, x: jax.Array, layer: Layer, name: str) -> jax.Array:
        """Applies a norm of the layer, if its family has one there."""
        return self.norm(x, layer[name]) if name in layer else x

    def rope_tables(self, positions: jax.Array) -> dict[Rope | None, RopeTable]:
        """Computes the tables of i32[B, T] positions, one for each rope of the layers."""
        settings: Any = {"head_dim": self.config.rope_dim, "precision": self.precision}
        ropes = dict.fromkeys(group.kind.rope for group in self.config.groups)
        return {rope: rope_table(positions, rope=rope, **settings) for rope in ropes}

    def scoring(self, group: Group, layer: Layer) -> Scoring:
        """Returns the scores of a layer of a group, for keys times `key_factor`."""
        scale, cap = self.config.score_scale / self.key_factor, self.config.score_cap
        return Scoring(group.kind.window, scale, cap, layer.get("sinks"))

    def enter(self, embedded: jax.Array) -> jax.Array:
        """Makes the residual stream [B, T, D] from rows of the embedding. Some families scale them
        by sqrt(D), rounded to `compute` as transformers rounds it to the weights' dtype."""
        precision = self.precision
        if not self.config.scaled_embedding:
            return precision.rounded(embedded, "embedding")
        scale = jnp.asarray(self.config.hidden_size**0.5, precision.compute)
        wide = embedded.astype(precision.accumulate) * scale.astype(precision.accumulate)
        stream = precision.rounded(wide, "embedding")
        return with_its_bits(stream) if precision.sums == "fixed" else stream


OWN = "own"
"""Name of `SortedRows` beside a layer's parameters, whose adapters are then stacked along a first
axis: each row has its own."""

_DIVIDED = ("q", "k", "v", "qkv")  # projections that are rounded once they are divided by heads


def project(x: jax.Array, layer: Layer, name: str, *, context: LayerContext) -> jax.Array:
    """Multiplies by a matrix of the layer and its adapter, if it has one: W x + B (A x);
    [..., in] -> [..., out] in `precision.activations`."""
    precision = context.precision

    def times(x: jax.Array, name: str, layer: Layer) -> jax.Array:
        gradient = context.gradients.get(name)
        if precision.blocks == "int8" and name in blocks.MATRICES:
            return int8_matmul(x, layer[name], precision=precision, gradient=gradient)
        x, weight = blocks.operand(x, name, precision), blocks.matrix(layer[name], name, precision)
        return matmul(x, weight, precision=precision, gradient=gradient)

    def adapter(x: jax.Array, own: Layer) -> jax.Array:
        return times(times(x, f"{name}_a", own), f"{name}_b", own)

    y = times(x, name, layer)
    if f"{name}_a" not in layer:
        return y if name in _DIVIDED else precision.rounded(y, "products")
    more = with_adapter(adapter, x, layer, name)
    wide = y.astype(precision.accumulate) + more.astype(precision.accumulate)
    return precision.rounded(wide, "products")


def with_adapter(
    function: Callable[[jax.Array, Layer], jax.Array], x: jax.Array, layer: Layer, name: str
) -> jax.Array:
    """Applies a function of [B, ...] and the adapter of the layer's matrix `name`; where rows have
    adapters of their own, to each row and its adapter."""
    own = {part: layer[part] for part in (f"{name}_a", f"{name}_b")}
    return layer[OWN].apply(function, x, own) if OWN in layer else function(x, own)


def add_bias(y: jax.Array, layer: Layer, name: str, *, precision: Precision) -> jax.Array:
    """Adds the bias of a projection [B, T, out], if the layer has one, in `accumulate`; the result
    is in `precision.activations`."""
    if f"{name}_bias" not in layer:
        return y
    bias = layer[f"{name}_bias"].astype(precision.accumulate).reshape(1, 1, -1)
    return precision.rounded(y.astype(precision.accumulate) + bias, "products")


def _embed_forward(table, tokens, precision):
    # The empty slice carries the table's shape and dtype to the backward pass.
    return table[tokens].astype(precision.activations), (tokens, table[:, :0])


def _embed_backward(precision, residuals, dy):
    tokens, table = residuals
    zeros = jnp.zeros((table.shape[0], dy.shape[-1]), precision.accumulate)
    # A frequent token sums many gradients, so it needs more than 8 or 11 bits of mantissa.
    dtable = zeros.at[tokens].add(dy.astype(precision.accumulate))
    return dtable.astype(table.dtype), None


_embed: Any = jax.custom_vjp(lambda *args: _embed_forward(*args)[0], nondiff_argnums=(2,))
_embed.defvjp(_embed_forward, _embed_backward)


def embed(table: jax.Array, tokens: jax.Array, *, precision: Precision) -> jax.Array:
    """Looks up rows of the embedding: [V, D] and i32[B, T] -> [B, T, D], in `activations`."""
    return _embed(table, tokens, precision)


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, precision: Precision) -> jax.Array:
    """Applies the root-mean-square norm over the last axis (arXiv:1910.07467): [..., D] and the
    weight [D] -> [..., D] in `precision.activations`."""
    wide = x.astype(precision.accumulate)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    scale = weight.astype(precision.accumulate).reshape((1,) * (x.ndim - 1) + weight.shape)
    return precision.rounded(wide * inverse * scale, "norms")
