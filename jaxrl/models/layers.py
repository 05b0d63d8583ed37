"""The decoder's layers as pure functions of arrays; every cast follows the `Precision`.

Matrix products take operands in `compute`, accumulate in `accumulate` and return `activations`, in
the forward and backward passes. Norms, rotary embedding and silu are computed in `accumulate`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.core.precision import Precision
from jaxrl.models.families import DecoderConfig
from jaxrl.models.products import matmul

Layer = Mapping[str, jax.Array]  # one layer's parameters, without the "layers" dimension
# (activation, logical name of each dimension) -> the activation, its sharding constrained.
Constrain = Callable[[jax.Array, Sequence[str]], jax.Array]


def identity(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Returns an array of any shape unchanged: `Constrain` on a single device."""
    del axes
    return x


class Local(Protocol):
    """Runs a function on each device's part of its arguments; see `sharding.partition.Layout`."""

    def __call__(
        self,
        function: Callable[..., jax.Array],
        *,
        inputs: Sequence[Sequence[str]],
        output: Sequence[str],
    ) -> Callable[..., jax.Array]:
        """Wraps `function`; `inputs` and `output` are the logical axes of arguments and result."""
        ...


def undivided(
    function: Callable[..., jax.Array],
    *,
    inputs: Sequence[Sequence[str]],
    output: Sequence[str],
) -> Callable[..., jax.Array]:
    """Returns the function unchanged: `Local` on a single device."""
    del inputs, output
    return function


class LayerContext(NamedTuple):
    """Settings that all layers of a forward pass share.

    Attributes:
      config: the decoder's.
      precision: the dtype policy.
      constrain: constrains the sharding of activations.
      local: runs experts on the devices that hold them.
    """

    config: DecoderConfig
    precision: Precision
    constrain: Constrain = identity
    local: Local = undivided

    def norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Applies `rms_norm` with the decoder's epsilon."""
        return rms_norm(x, weight, eps=self.config.rms_norm_eps, precision=self.precision)


def project(x: jax.Array, layer: Layer, name: str, *, precision: Precision) -> jax.Array:
    """Multiplies by a matrix of the layer and its adapter, if it has one: W x + B (A x);
    [..., in] -> [..., out] in `precision.activations`."""
    y = matmul(x, layer[name], precision=precision)
    if f"{name}_a" not in layer:
        return y
    low = matmul(x, layer[f"{name}_a"], precision=precision)
    more = matmul(low, layer[f"{name}_b"], precision=precision)
    wide = y.astype(precision.accumulate) + more.astype(precision.accumulate)
    return wide.astype(precision.activations)


def _embed_forward(table, tokens, precision):
    # The empty slice carries the table's shape and dtype to the backward pass.
    return table[tokens].astype(precision.activations), (tokens, table[:, :0])


def _embed_backward(precision, residuals, dy):
    tokens, table = residuals
    zeros = jnp.zeros((table.shape[0], dy.shape[-1]), precision.accumulate)
    # A frequent token sums many gradients, so it needs more than 8 or 11 bits of mantissa.
    dtable = zeros.at[tokens].add(dy.astype(precision.accumulate))
    return dtable.astype(table.dtype), None


_embed: Any = jax.custom_vjp(
    lambda table, tokens, precision: _embed_forward(table, tokens, precision)[0],
    nondiff_argnums=(2,),
)
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
    return (wide * inverse * scale).astype(precision.activations)
