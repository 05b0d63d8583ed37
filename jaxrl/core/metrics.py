"""Means that merge exactly across microbatches, devices and steps."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@struct.dataclass
class Mean:
    """A mean that has not been divided yet: `total / weight`.

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
    """A number that counts from the start, or that steps hand on: of two, the later one stands."""

    def __add__(self, other: Mean) -> Mean:
        return other


Metrics = dict[str, Mean]


def masked_mean(values: jax.Array, mask: jax.Array) -> Mean:
    """Mean of the entries of `values` where `mask` holds; both of one shape. Entries outside the
    mask may hold anything, NaN too."""
    mask = mask.astype(bool)
    total = jnp.sum(jnp.where(mask, values, 0).astype(jnp.float32))
    return Mean(total, jnp.sum(mask, dtype=jnp.float32))


def merge(first: Mapping[str, Mean], second: Mapping[str, Mean]) -> Metrics:
    """The metrics over both populations, of which `second` is the later one; a name that only one
    of them has is kept as it is."""
    both = first.keys() & second.keys()
    return dict(first) | dict(second) | {name: first[name] + second[name] for name in both}


def to_floats(metrics: Mapping[str, Mean]) -> dict[str, float]:
    """The values on the host, for logging; a mean over an empty population is left out."""
    host = jax.device_get(dict(metrics))
    return {k: float(np.float64(m.total) / m.weight) for k, m in host.items() if m.weight != 0}
