"""The sum of a matrix's gradient over the devices that have its rows."""

import dataclasses
from collections.abc import Callable

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import MeshAxes

Product = Callable[[jax.Array, jax.Array], jax.Array]  # [N, out] and [N, in] -> [out, in]


@dataclasses.dataclass(frozen=True)
class GradientSum:
    """A reduce-scatter of a matrix's gradient: each device multiplies its own rows at once, and
    keeps its own part of the sum. Hashable.

    Left to itself, XLA for TPUs cuts the product into one for each device and sends partial sums
    between them ("windowed einsum"), which are written to memory each time.
    """

    layout: Layout
    axes: tuple[str, ...]  # logical axes of the matrix [out, in]

    @property
    def possible(self) -> bool:
        """True if the gradient is cut, and only over devices that have different rows."""
        cuts = list(zip(*self._entries, strict=True))
        added = [axis for whole, cut in cuts for axis in cut[len(whole) :]]
        inside = all(cut[: len(whole)] == whole for whole, cut in cuts)
        return bool(added) and inside and set(added) <= set(self._rows)

    def __call__(self, product: Product, dy: jax.Array, x: jax.Array) -> jax.Array:
        """Computes the gradient [out, in] in the dtype of `product`, in which it is also summed.

        Args:
          product: of the rows of one device.
          dy: [B, T, out], the gradient of the matrix's results.
          x: [B, T, in], what the matrix multiplied.
        """
        entries, batch = list(zip(*self._entries, strict=True)), self.layout.batch
        scattered = {axis for whole, cut in entries for axis in cut[len(whole) :]}
        others = tuple(axis for axis in self._rows if axis not in scattered)

        def on_device(dy: jax.Array, x: jax.Array) -> jax.Array:
            total = product(dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]))
            total = lax.psum(total, others) if others else total
            for i, (whole, cut) in enumerate(entries):
                if more := cut[len(whole) :]:
                    total = lax.psum_scatter(total, more, scatter_dimension=i, tiled=True)
            return total

        rows = (*batch(("batch", "length")).spec, None, None)[:2]
        return jax.shard_map(
            on_device,
            mesh=self.layout.mesh,
            in_specs=tuple(PartitionSpec(*rows, whole or None) for whole, _ in entries),
            out_specs=PartitionSpec(*(cut or None for _, cut in entries)),
            check_vma=False,
        )(dy, x)

    @property
    def _rows(self) -> MeshAxes:
        return (*self.layout.axes("batch"), *self.layout.axes("length"))

    @property
    def _entries(self) -> tuple[list[MeshAxes], list[MeshAxes]]:
        """Mesh axes of each dimension, of the gathered matrix and of the gradient."""
        shardings = self.layout.gathered(self.axes), self.layout.sharding(self.axes)
        whole, cut = ([*one.spec, *[None] * len(self.axes)][: len(self.axes)] for one in shardings)
        return [_tuple(x) for x in whole], [_tuple(x) for x in cut]


def _tuple(entry: str | MeshAxes | None) -> MeshAxes:
    return (entry,) if isinstance(entry, str) else entry or ()
