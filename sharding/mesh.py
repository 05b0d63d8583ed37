"""Builds device meshes. Nothing else in the project does."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

# In this order over the devices, the last one fastest: what talks most is closest together.
AXES = ("data", "fsdp", "expert", "context", "tensor")

# XLA's partitioner propagates shardings from the constraints that `partition.Layout` states.
# With Explicit axes, the default, every operation must agree on them itself.
_AXIS_TYPE = AxisType.Auto


def make_mesh(
    *,
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh over all devices, with every axis of `AXES` in it.

    Args:
      data: number of replicas that see different rows of a batch.
      fsdp: number of devices that a replica's parameters and rows are cut over (ZeRO stage 3,
        arXiv:1910.02054).
      expert: number of devices that the experts of a layer are dealt out to (arXiv:2006.16668).
      context: number of devices that the tokens of a row are cut over.
      tensor: number of devices that one matrix product is cut over (arXiv:1909.08053).
      devices: which `jax.Device`s; all of them by default.

    One size may be -1: the number of devices that the others leave.

    Raises:
      ValueError: if the sizes do not multiply to the number of devices; with the numbers.
    """
    devices = jax.devices() if devices is None else devices
    given: dict[str, int] = dict(zip(AXES, (data, fsdp, expert, context, tensor), strict=True))
    sizes = _resolve(given, devices=len(devices))
    # As jax.make_mesh, which refuses 8 x 8 on chips that are wired 4 x 4 x 4: an axis of the wires
    # is divided between two of the mesh where there is no other way.
    arranged = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(arranged, AXES, axis_types=(_AXIS_TYPE,) * len(AXES))


def _resolve(sizes: dict[str, int], *, devices: int) -> tuple[int, ...]:
    named = {axis: size for axis, size in sizes.items() if size != 1}
    shown = " x ".join(f"{axis}={size}" for axis, size in named.items()) or "of one device"
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    known = [size for size in sizes.values() if size != -1]
    if any(size < 1 for size in known):
        raise ValueError(f"mesh {shown}: a size is a positive number, or -1 for the rest")
    if len(open_axes) > 1:
        raise ValueError(f"mesh {shown}: only one of {', '.join(open_axes)} can be -1")
    product = math.prod(known)
    if open_axes and devices % product:
        raise ValueError(
            f"mesh {shown}: the known sizes multiply to {product}, which does not divide the "
            f"{devices} devices"
        )
    if not open_axes and product != devices:
        raise ValueError(
            f"mesh {shown} needs {product} devices and there are {devices}; change a size, or "
            "pass other devices"
        )
    return tuple(devices // product if size == -1 else size for size in sizes.values())
