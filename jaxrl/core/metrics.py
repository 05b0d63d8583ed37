"""Means that merge exactly across microbatches, devices and steps."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@struct.dataclass
class Mean:
    """An undivided mean: `total / weight`.

    Adding two of them gives the mean over both populations, so a metric computed in microbatches
    equals the metric of the whole batch.
    """

    total: jax.Array  # f32[]
    weight: jax.Array  # f32[]

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> jax.Array:
        """The mean, f32[]; 0 over an empty population."""
        return self.total / jnp.where(self.weight == 0, 1, self.weight)


@struct.dataclass
class Latest(Mean):
    """A running count or a state: `+` keeps the later one."""

    def __add__(self, other: Mean) -> Mean:
        return other


Metrics = dict[str, Mean]
"""Named means, which `merge` adds."""


def masked_mean(values: jax.Array, mask: jax.Array) -> Mean:
    """Averages the entries of `values` where `mask`, of the same shape, holds. Entries outside it
    may be anything, including NaN. No gradient passes."""
    mask = mask.astype(bool)
    total = jnp.sum(jnp.where(mask, jax.lax.stop_gradient(values), 0).astype(jnp.float32))
    return Mean(total, jnp.sum(mask, dtype=jnp.float32))


def masked_means(values: Mapping[str, jax.Array], mask: jax.Array) -> Metrics:
    """Applies `masked_mean` to each array."""
    return {name: masked_mean(array, mask) for name, array in values.items()}


def merge(first: Mapping[str, Mean], second: Mapping[str, Mean]) -> Metrics:
    """Merges the metrics of two populations; `second` is the later one. A name in only one of them
    is kept unchanged."""
    both = first.keys() & second.keys()
    return dict(first) | dict(second) | {name: first[name] + second[name] for name in both}


def to_floats(metrics: Mapping[str, Mean]) -> dict[str, float]:
    """Fetches the values to the host for logging; omits means over empty populations."""
    host = jax.device_get(dict(metrics))
    return {k: float(np.float64(m.total) / m.weight) for k, m in host.items() if m.weight != 0}
