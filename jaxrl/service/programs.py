"""The programs of a pool: losses and gradients of a batch of several tenants."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.core import Precision, as_served, cast, sampler_precision, segment_totals
from jaxrl.models import Head, Model, Params, lora
from jaxrl.service.losses import find
from jaxrl.service.target_logprobs import target_logprobs


class Trained(NamedTuple):
    """The static inputs of a pool's programs.

    Attributes:
      model: the decoder.
      precision: the dtype policy.
      alpha: of the tenants' adapters; None if they train all parameters.
    """

    model: Model
    precision: Precision
    alpha: float | None

    def whole(self, trained: Any, frozen: Any) -> Any:
        """Returns what the model takes, from what a tenant trains and the base."""
        return trained if self.alpha is None else lora.Adapted(trained, frozen, self.alpha)


def compute(
    base: Params,
    mine: Any,
    scale: jax.Array,
    arrays: Mapping[str, jax.Array],
    *,
    pool: Trained,
    loss: str,
    backward: bool,
) -> tuple[Any, jax.Array, jax.Array]:
    """Computes gradients, log-probs and losses of rows [A, R, T]. `mine` are the parameters of A
    tenants, stacked, and `scale` f32[A] their loss scales. The gradients, in precision.grads and
    without the scale, are None without `backward`."""
    precision, whole = pool.precision, None
    trained = cast(mine, precision.compute)
    frozen = None if pool.alpha is None else cast(base, precision.compute)
    if pool.alpha is not None and precision.sums == "fixed":  # A = 1: merged, as in the sampler
        own = cast(jax.tree.map(lambda x: x[0], mine), precision.wire)
        whole = lora.Adapted(own, base, pool.alpha)
        merged = cast(lora.merge(whole), precision.compute)
        trained, pool = jax.tree.map(lambda x: x[None], merged), pool._replace(alpha=None)

    def total(trained: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        logprobs = _logprobs(pool, trained, frozen, arrays)
        losses = _losses(find(loss), logprobs, arrays)
        return jnp.sum(jnp.sum(losses, axis=(1, 2, 3)) * scale), (logprobs, losses)

    if not backward:
        return None, *total(trained)[1]
    gradients, found = jax.grad(total, has_aux=True)(trained)
    if whole is not None:
        wide = jax.tree.map(lambda x: x[0].astype(jnp.float32), gradients)
        gradients = jax.tree.map(lambda x: x[None], lora.of_adapters(whole, wide))

    def unscaled(x: jax.Array) -> jax.Array:
        each = scale.reshape(-1, *[1] * (x.ndim - 1))
        return (x.astype(jnp.float32) / each).astype(precision.grads)

    return jax.tree.map(unscaled, gradients), *found


def shadow_logprobs(
    base: Params, mine: Any, arrays: Mapping[str, jax.Array], *, pool: Trained
) -> jax.Array:
    """Computes log-probs of rows [A, R, T] as the sampler does, f32[A, R, T, K]; `mine` as
    `compute` takes them."""
    trained = as_served(mine, pool.precision)
    frozen = None if pool.alpha is None else as_served(base, pool.precision)
    pool = pool._replace(precision=sampler_precision(pool.precision))
    return _logprobs(pool, trained, frozen, arrays)


def _logprobs(
    pool: Trained, trained: Any, frozen: Any, arrays: Mapping[str, jax.Array]
) -> jax.Array:
    """Computes log-probs of the targets, f32[A, R, T, K]."""
    model, precision = pool.model, pool.precision
    inputs = [arrays[name] for name in ("tokens", "positions", "segments")]
    found = {name: arrays[name] for name in ("targets", "mask")}

    def hidden_of(trained: Any, tokens: Any, positions: Any, segments: Any) -> jax.Array:
        whole = pool.whole(trained, frozen)
        return model.hidden(whole, tokens, positions, segments, precision=precision)

    def scored(hidden: jax.Array, head: Head, arrays: Mapping[str, jax.Array]) -> jax.Array:
        return target_logprobs(hidden, head, arrays, precision=precision)

    if len(inputs[0]) == 1:  # XLA computes one tenant faster without an axis of tenants
        trained, inputs, found = jax.tree.map(lambda x: x[0], (trained, inputs, found))
        head = model.gathered_head(pool.whole(trained, frozen))
        return scored(hidden_of(trained, *inputs), head, found)[None]
    # Rows first: they are what devices divide.
    hidden = jax.vmap(hidden_of, out_axes=1)(trained, *inputs)
    head = model.gathered_head(frozen)
    adapters = model.head_adapter(pool.whole(trained, frozen))
    if adapters is not None:  # one after the other, so that none meets another's numbers

        def one(own: tuple[jax.Array, jax.Array, dict[str, jax.Array]]) -> jax.Array:
            hidden, adapter, found = own
            adapter = model.gather(adapter, ("vocab", "rank"))
            return scored(hidden, head._replace(adapter=adapter), found)

        return jax.lax.map(one, (jnp.swapaxes(hidden, 0, 1), adapters, found))
    rows = {name: jnp.swapaxes(x, 0, 1) for name, x in found.items()}
    logprobs = scored(hidden.reshape(-1, *hidden.shape[2:]), head, rows)
    return jnp.swapaxes(logprobs.reshape(*hidden.shape[:2], *logprobs.shape[1:]), 0, 1)


def _losses(loss: Any, logprobs: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
    """Computes the loss per target, f32[A, R, T, K]; 0 at padding."""
    segments = arrays["segments"].reshape(-1, logprobs.shape[2])

    def mean(values: jax.Array, marks: jax.Array) -> jax.Array:
        marked = (marks != 0).astype(jnp.float32)
        flat = [x[..., 0].reshape(segments.shape) for x in (values * marked, marked)]
        sums, counts = (segment_totals(x, segments) for x in flat)
        found = jnp.take_along_axis(sums / jnp.maximum(counts, 1), segments, axis=1)
        return found.reshape(values.shape)

    found = loss.apply(logprobs, arrays, mean)
    return jnp.where(arrays["mask"][..., None], found, 0)
