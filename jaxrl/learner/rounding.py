"""The part of an update that rounding takes away: in the parameters, and in what is published."""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

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
    squares = jax.tree.map(
        lambda a, b: (b.astype(jnp.float32) - a.astype(jnp.float32)) ** 2, before, after
    )
    narrow = jnp.dtype(jnp.bfloat16)
    once = precision.wire == precision.sampler == narrow and precision.blocks != "e4m3"

    def on_chip(squares: jax.Array, same: jax.Array, *both: jax.Array) -> _Sums:
        # With the same cast here, XLA would keep the one that the step begins with, and read it.
        if once:
            a, b = (lax.reduce_precision(x.astype(jnp.float32), 8, 7) for x in both)
            same = a == b
        return _sums_by_sign(squares, same)

    def on_cpu(squares: jax.Array, same: jax.Array, *_: jax.Array) -> _Sums:
        return _sums(squares, same)

    found = jax.tree.map(
        lambda *given: lax.platform_dependent(*given, cpu=on_cpu, default=on_chip),
        squares,
        same,
        before,
        after,
    )
    parts = jax.tree.leaves(found, is_leaf=lambda leaf: isinstance(leaf, _Sums))
    return {
        "publish/changed": _sum([Mean(one.changed, one.words) for one in parts]),
        "publish/absorbed": _sum([Mean(one.unseen, one.squares) for one in parts]),
    }


class _Sums(NamedTuple):
    """Comparison of one array before and after a step."""

    changed: jax.Array  # f32[], words whose value differs
    words: jax.Array  # f32[]
    unseen: jax.Array  # f32[], squares of the update at the other words
    squares: jax.Array  # f32[]


def _sums(squares: jax.Array, same: jax.Array) -> _Sums:
    changed = masked_mean(~same, jnp.ones_like(same, bool))
    unseen = jnp.sum(jnp.where(same, squares, 0))
    return _Sums(changed.total, changed.weight, unseen, jnp.sum(squares))


def _sums_by_sign(squares: jax.Array, same: jax.Array) -> _Sums:
    """Equals `_sums`, but for the rounding of each square to bf16. To read weights before and after
    an update in place, XLA for GPUs and TPUs copies all of them. Here the update's own pass writes
    squares, those of changed words with a minus sign."""
    signed = jnp.where(same, squares, -squares).astype(jnp.bfloat16)
    signed = lax.optimization_barrier(signed).astype(jnp.float32)
    changed = masked_mean(jnp.signbit(signed), jnp.ones_like(same, bool))
    size = jnp.abs(signed)
    # Twice the positive terms: of a constant 0, XLA would read an array of zeros.
    unseen = jnp.sum(size + signed) / 2
    return _Sums(changed.total, changed.weight, unseen, jnp.sum(size))


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
