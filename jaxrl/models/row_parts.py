"""The division of a batch over devices, for the output layer.

The output layer works on a row at a time. If devices have parts of rows, each part is a row of its
own there: no device computes another one's positions.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl.sharding.partition import Layout

_TOKENS = ("batch", "length")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Rows:
    """The division of a batch [B, T, ...] over devices: by rows, and by the tokens of a row.

    `divide`, `before` and `join` are for rows that are cut. Parts are ordered as the devices are.
    """

    layout: Layout | None = None  # None for one device

    @property
    def platform(self) -> str:
        """The kind of the devices, such as "gpu"."""
        devices = jax.devices() if self.layout is None else self.layout.mesh.devices.flat
        return next(iter(devices)).platform

    @property
    def apart(self) -> bool:
        """True if each device has rows, or parts of rows, of its own."""
        return self.layout is None or self.parts == self.layout.mesh.size

    @property
    def per_row(self) -> int:
        """Number of parts that a row is cut into."""
        return 1 if self.layout is None else self.layout.count("length")

    @property
    def parts(self) -> int:
        """Number of parts that the batch is cut into."""
        return 1 if self.layout is None else _by_parts(self.layout).count("batch")

    def constrain(self, x: jax.Array, axes: Sequence[str]) -> jax.Array:
        """Constrains an array whose "batch" are parts, as `Layout.constrain`."""
        return x if self.layout is None else _by_parts(self.layout).constrain(x, axes)

    def by_device(
        self, function: Callable[..., Any], *, divided: Sequence[bool]
    ) -> Callable[..., Any]:
        """Wraps a function of arrays to run on each device's own rows, if rows are `apart`: the
        first dimension of results, and of arguments that are `divided`."""
        if self.layout is None or self.layout.mesh.size == 1:
            return function
        own, whole = _by_parts(self.layout).batch(("batch",)).spec, PartitionSpec()
        specs = tuple(own if one else whole for one in divided)
        return jax.shard_map(
            function, mesh=self.layout.mesh, in_specs=specs, out_specs=own, check_vma=False
        )

    def divide(self, x: jax.Array) -> jax.Array:
        """Makes rows of the parts: [B, T, ...] -> [B * n, T / n, ...]. Nothing is sent."""
        assert self.layout is not None
        return _on_devices(lambda own: own, self.layout, _by_parts(self.layout))(x)

    def before(self, x: jax.Array) -> jax.Array:
        """Makes rows of the parts, and moves each entry of a row one place on: the first of a part
        is the last of the part before, and the first of a row 0."""
        assert self.layout is not None
        axes = self.layout.axes("length")

        def on_device(own: jax.Array) -> jax.Array:
            following = [(i, i + 1) for i in range(self.per_row - 1)]
            last = jax.lax.ppermute(own[:, -1:], axes, following)
            return jnp.concatenate([last, own[:, :-1]], axis=1)

        return _on_devices(on_device, self.layout, _by_parts(self.layout))(x)

    def join(self, x: jax.Array) -> jax.Array:
        """Inverts `divide`."""
        assert self.layout is not None
        return _on_devices(lambda own: own, _by_parts(self.layout), self.layout)(x)


def _by_parts(layout: Layout) -> Layout:
    return layout.whole_rows("batch")


def _on_devices(function, source: Layout, target: Layout):
    specs = (one.batch(_TOKENS).spec for one in (source, target))
    return jax.shard_map(
        function, mesh=source.mesh, in_specs=next(specs), out_specs=next(specs), check_vma=False
    )
