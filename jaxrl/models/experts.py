"""Mixtures of experts: routing, and one grouped matrix product over the tokens of all experts.

No token is dropped and no expert has a capacity: tokens are sorted by expert, and the product is
ragged (arXiv:2211.15841). Routing is computed in `accumulate`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.core.precision import Precision
from jaxrl.models import layers
from jaxrl.models.families import DecoderConfig
from jaxrl.models.layers import Constrain, Layer, identity, matmul, rms_norm


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


class Routing(NamedTuple):
    """Routing decisions of one layer."""

    probs: jax.Array  # [B, T, E], over all experts, in `accumulate`
    experts: jax.Array  # i32[B, T, k]
    weights: jax.Array  # [B, T, k], factors of the experts' outputs


def feed_forward(
    x: jax.Array,
    layer: Layer,
    *,
    config: DecoderConfig,
    precision: Precision,
    constrain: Constrain = identity,
    local: Local = undivided,
    recorded: jax.Array | None = None,
) -> tuple[jax.Array, Routing | None]:
    """Computes the feed-forward part of a layer, dense or a mixture of experts.

    Args:
      x: [B, T, D], the residual stream.
      layer: parameters of one layer.
      config: the decoder's.
      precision: the dtype policy.
      constrain: constrains the sharding of activations.
      local: runs the experts on the devices that hold them.
      recorded: i32[B, T, k], experts to use instead of the router's choice (routing replay,
        arXiv:2510.11370). A negative entry means that none are recorded for the token. The weights
        are the router's own for these experts, so the router still learns.

    Returns:
      [B, T, D] to be added to the stream, and the routing, None for a dense decoder.
    """
    if config.experts is None:
        dims = {"config": config, "precision": precision, "constrain": constrain}
        return layers.feed_forward(x, layer, **dims), None
    x = rms_norm(x, layer["mlp_norm"], eps=config.rms_norm_eps, precision=precision)
    routing = route(x, layer["router"], config=config, precision=precision, recorded=recorded)
    rows, projection = ("routed", "length"), ("experts", "mlp", "embed")
    run = local(
        functools.partial(_mixture, precision=precision),
        inputs=(
            (*rows, "embed"),
            (*rows, "embed"),
            (*rows, "embed"),
            ("experts",),
            projection,
            projection,
            ("experts", "embed", "mlp"),
        ),
        # Each device holds a part of the sum over experts and over their hidden units.
        output=("experts", "mlp", *rows, "embed"),
    )
    numbers = jnp.arange(config.experts.count, dtype=jnp.int32)
    weights = (layer["expert_gate"], layer["expert_up"], layer["expert_down"])
    parts = run(x, routing.experts, routing.weights, numbers, *weights)
    y = jnp.sum(parts, axis=(0, 1)).astype(precision.activations)
    return constrain(y, ("batch", "length", "embed")), routing


def route(
    x: jax.Array,
    router: jax.Array,
    *,
    config: DecoderConfig,
    precision: Precision,
    recorded: jax.Array | None = None,
) -> Routing:
    """Chooses each token's experts: those with the largest softmax probabilities.

    Args:
      x: [B, T, D], normed.
      router: [E, D].
      config: the decoder's, with experts.
      precision: the product's operands are in `compute`; its result is not rounded.
      recorded: see `feed_forward`.
    """
    settings = config.experts
    assert settings is not None
    unrounded = dataclasses.replace(precision, activations=precision.accumulate)
    probs = jax.nn.softmax(matmul(x, router, precision=unrounded), axis=-1)
    _, experts = lax.top_k(lax.stop_gradient(probs), settings.per_token)
    if recorded is not None:
        experts = jnp.where(jnp.any(recorded < 0, axis=-1, keepdims=True), experts, recorded)
    weights = jnp.take_along_axis(probs, experts, axis=-1)
    if settings.renormalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Routing(probs, experts, weights)


def imbalance(routing: Routing, segments: jax.Array) -> jax.Array:
    """Computes the load-balancing loss per token: f32[B, T], 0 at padding.

    Its mean over a sequence is E * sum over experts of (share of the sequence's tokens sent to the
    expert) * (the expert's mean probability) (arXiv:2101.03961, with the shares of one sequence as
    in arXiv:2412.19437). It equals k, the experts per token, when all experts are used equally.
    Shares are taken within a sequence, so packing and microbatches do not change the loss.
    """
    batch, length, count = routing.probs.shape
    rows = jnp.arange(batch)[:, None, None]
    zeros = jnp.zeros((batch, length + 1, count), jnp.float32)
    sent = zeros.at[rows, segments[:, :, None], routing.experts].add(1)
    tokens = jnp.sum(sent, axis=-1, keepdims=True) / routing.experts.shape[-1]
    shares = sent / jnp.maximum(tokens, 1)
    own = jnp.take_along_axis(shares, segments[:, :, None], axis=1)
    cost = count * jnp.sum(own * routing.probs.astype(jnp.float32), axis=-1)
    return jnp.where(segments > 0, cost, 0)


def _mixture(x, experts, weights, numbers, gate, up, down, *, precision):
    """Computes the contribution of the experts `numbers` [e] to the mixture, in `accumulate`:
    [1, 1, B, T, D]. The matrices are [e, F, D], [e, F, D] and [e, D, F]."""
    *shape, chosen = experts.shape
    here = experts.reshape(-1) - numbers[0]
    here = jnp.where((here >= 0) & (here < len(numbers)), here, len(numbers))  # others come last
    order = jnp.argsort(here, stable=True)
    sizes = jnp.bincount(here, length=len(numbers) + 1)[:-1].astype(jnp.int32)
    # The ragged product leaves the rows of other devices' experts undefined.
    inside = (jnp.arange(len(order)) < jnp.sum(sizes))[:, None]
    # A token's gradient sums over its experts, so it needs more than 8 or 11 bits of mantissa.
    tokens = x.reshape(-1, 1, x.shape[-1]).astype(precision.accumulate)
    tokens = jnp.repeat(tokens, chosen, axis=1).reshape(-1, x.shape[-1])[order]
    tokens = jnp.where(inside, tokens, 0)
    product = functools.partial(_grouped, sizes=sizes, precision=precision)
    a = product(tokens, gate).astype(precision.accumulate)
    b = product(tokens, up).astype(precision.accumulate)
    y = product((jax.nn.silu(a) * b).astype(precision.activations), down)
    y = jnp.where(inside, y.astype(precision.accumulate), 0)
    y = y[jnp.argsort(order)].reshape(-1, chosen, x.shape[-1])
    y = jnp.sum(y * weights.reshape(-1, chosen, 1), axis=1)
    return y.reshape(1, 1, *shape, x.shape[-1])


def _dimensions(contract: tuple[int, int], *, group: Sequence[int]) -> Any:
    return lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((contract[0],), (contract[1],)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=group,
    )


def _grouped(x, weight, *, sizes, precision):
    """Computes `x @ weight[g].T` for the rows of each group g: [M, in] and [G, out, in] -> [M, out]
    in `activations`. The first `sizes[0]` rows are those of group 0, and so on."""
    x = x.astype(precision.activations)
    return _product(x, weight.astype(precision.compute), sizes, precision)


def _product_forward(x, weight, sizes, precision):
    x = x.astype(precision.compute)
    y = lax.ragged_dot_general(
        x,
        weight,
        sizes,
        _dimensions((1, 2), group=[0]),
        preferred_element_type=precision.accumulate,
    )
    return y.astype(precision.activations), (x, weight, sizes)


def _product_backward(precision, residuals, dy):
    x, weight, sizes = residuals
    dy = dy.astype(precision.compute)
    dot = functools.partial(
        lax.ragged_dot_general,
        group_sizes=sizes,
        preferred_element_type=precision.accumulate,
    )
    dx = dot(dy, weight, ragged_dot_dimension_numbers=_dimensions((1, 1), group=[0]))
    dweight = dot(dy, x, ragged_dot_dimension_numbers=_dimensions((0, 0), group=[]))
    return dx.astype(precision.activations), dweight.astype(weight.dtype), None


_product: Any = jax.custom_vjp(
    lambda x, weight, sizes, precision: _product_forward(x, weight, sizes, precision)[0],
    nondiff_argnums=(3,),
)
_product.defvjp(_product_forward, _product_backward)
