"""The part of an update that rounding takes away: in the parameters, and in what is published."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.core.casts import as_served
from jaxrl.core.metrics import Mean, Metrics, masked_mean
from jaxrl.core.precision import Precision
from jaxrl.models import lora


def absorbed(updates: Any, old: Any, new: Any, *, finite: jax.Array) -> Mean:
    """The share of updates other than 0 that leave the rounded parameter as it was; updates that
    are not `finite` were not applied."""
    moving = jax.tree.map(lambda u: finite & (u != 0), updates)
    masked = jax.tree.map(lambda a, b, mask: masked_mean(a == b, mask), old, new, moving)
    return _sum(masked)


def publish_metrics(old: Any, new: Any, *, precision: Precision) -> Metrics:
    """Compares the weights that samplers use before and after a step.

    `old` and `new` are the learner's parameters; of `lora.Adapted` the adapters alone.

    Returns:
      "publish/changed": share of the words of `as_served` whose value differs; "publish/absorbed":
      share of the update's squared norm at the other words, which samplers do not see.
    """
    before, after = lora.trainable(old), lora.trainable(new)
    served = [as_served(params, precision) for params in (before, after)]
    same = jax.tree.map(lambda a, b: a.astype(jnp.float32) == b.astype(jnp.float32), *served)
    update = jax.tree.map(
        lambda a, b: (b.astype(jnp.float32) - a.astype(jnp.float32)) ** 2, before, after
    )

    def lost(squares: jax.Array, unmoved: jax.Array) -> Mean:
        return Mean(jnp.sum(jnp.where(unmoved, squares, 0)), jnp.sum(squares))

    return {
        "publish/changed": _sum(
            jax.tree.map(lambda s: masked_mean(~s, jnp.ones_like(s, bool)), same)
        ),
        "publish/absorbed": _sum(jax.tree.map(lost, update, same)),
    }


def reporting_publish(
    step: Callable[..., Any], *, params_of: Callable[[Any], Any], precision: Precision | str
) -> Callable[..., Any]:
    """Adds `publish_metrics` to a step (state, minibatch) -> (state, metrics), unless samplers get
    the parameters as they are. `params_of` returns those of a state."""
    precision = Precision.of(precision)
    if min(precision.wire.itemsize, precision.sampler.itemsize) >= precision.params.itemsize >= 4:
        return step

    def reporting(state: Any, minibatch: Any) -> tuple[Any, Metrics]:
        after, metrics = step(state, minibatch)
        old, new = params_of(state), params_of(after)
        return after, metrics | publish_metrics(old, new, precision=precision)

    return reporting


def _sum(means: Any) -> Mean:
    leaves = jax.tree.leaves(means, is_leaf=lambda leaf: isinstance(leaf, Mean))
    return functools.reduce(operator.add, leaves)
