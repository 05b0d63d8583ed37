"""Construction of device meshes, used by the whole project."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "expert", "context", "tensor")
"""Mesh order, the last axis fastest: axes that communicate most are on the closest devices."""


def make_mesh(
    *,
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Builds a mesh over all devices that has every axis of `AXES`.

    Args:
      data: number of replicas, each with different rows of a batch.
      fsdp: number of devices that a replica's parameters and rows are sharded over (ZeRO stage 3,
        arXiv:1910.02054).
      expert: number of devices that the experts of a layer are sharded over (arXiv:2006.16668).
      context: number of devices that the tokens of a row are sharded over.
      tensor: number of devices that one matrix product is sharded over (arXiv:1909.08053).
      devices: the `jax.Device`s to use; all of them by default.

    One size may be -1: it takes the remaining devices.

    Raises:
      ValueError: if the product of the sizes is not the number of devices; the message gives both.
    """
    devices = jax.devices() if devices is None else devices
    given: dict[str, int] = dict(zip(AXES, (data, fsdp, expert, context, tensor), strict=True))
    sizes = _resolve(given, devices=len(devices))
    # jax.make_mesh refuses 8 x 8 on chips wired 4 x 4 x 4. This splits a physical axis between two
    # mesh axes where necessary.
    arranged = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    # XLA's partitioner propagates shardings from the constraints that `partition.Layout` states.
    # With Explicit axes, the default, every operation must agree on them itself.
    return Mesh(arranged, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def remesh(mesh: Mesh, *, expert: int = 1, tensor: int = 1) -> Mesh:
    """Builds another mesh over the devices of `mesh`, in the same order, so that a compiled program
    can move arrays from one to the other. The axis `data` takes the devices that remain.

    Raises:
      ValueError: if `expert` x `tensor` does not divide the number of devices.
    """
    sizes = _resolve(
        {**dict.fromkeys(AXES, 1), "data": -1, "expert": expert, "tensor": tensor},
        devices=mesh.size,
    )
    return Mesh(mesh.devices.reshape(sizes), AXES, axis_types=mesh.axis_types)


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
            f"mesh {shown} needs {product} device{'s' * (product != 1)} and there "
            f"{'is' if devices == 1 else 'are'} {devices}; change a size, or pass other devices"
        )
    return tuple(devices // product if size == -1 else size for size in sizes.values())
