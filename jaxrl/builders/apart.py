"""Devices of a model beside the policy: rows are copied to them, and scores back."""

import dataclasses
from typing import Any

import jax

from jaxrl.builders.layout import own_layout
from jaxrl.config.training import Config
from jaxrl.core import Minibatch
from jaxrl.sharding import Layout


class Apart:
    """The devices of a model with a mesh of its own, and a count of the bytes copied to and from
    them."""

    def __init__(self, layout: Layout, *, policy: Layout) -> None:
        """Takes the layouts of the model and of the policy."""
        self.layout, self._policy, self._bytes = layout, policy, 0

    def send(self, minibatch: Minibatch) -> Minibatch:
        """Copies a minibatch to the model's devices, without what only the policy's loss reads."""
        batch = dataclasses.replace(minibatch.batch, coefficients=None)
        return Minibatch(
            batch=self._copy(batch, self.layout),
            microbatches=minibatch.microbatches,
            rows_per_microbatch=minibatch.rows_per_microbatch,
        )

    def bring(self, scores: jax.Array) -> jax.Array:
        """Copies scores, f32[N, T, ...], to the policy's devices."""
        return self._copy(scores, self._policy)

    def taken(self) -> float:
        """Returns the bytes copied since the last call, each replica counted."""
        found, self._bytes = self._bytes, 0
        return float(found)

    def _copy(self, tree: Any, layout: Layout) -> Any:
        found = jax.device_put(tree, layout.batch(("batch", "length")))
        parts = [part for x in jax.tree.leaves(found) for part in x.addressable_shards]
        self._bytes += sum(part.data.nbytes for part in parts)
        return found


def open_apart(config: Config, table: str, *, policy: Layout) -> Apart | None:
    """Returns the devices of the model with this table of a mesh; None without one. Raises as
    `own_layout`."""
    if table not in config.own_meshes:
        return None
    return Apart(own_layout(config, table, shared=policy), policy=policy)
