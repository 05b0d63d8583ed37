"""Whole tensors for the processes that publish them, from parts on the devices of all processes.

Each device sends its part of a tensor to one device of the process that wants the tensor, which
copies it to its host. No device receives a tensor whole, and each process receives only its own.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.core.compiled import jit
from jaxrl.core.precision import DType

Groups = tuple[tuple[int, ...], ...]
"""Devices that send to each other, by their number in the mesh: one of each process that is needed
for whole tensors."""
_Place = tuple[tuple[int, ...], ...]  # first and end, by dimension


class Form(NamedTuple):
    """Conversion of a parameter to tensors, before they are sent."""

    stacked: bool  # by layers, along the first dimension
    transposed: bool  # the last two dimensions are swapped
    dtype: DType

    @property
    def bits(self) -> DType:
        """Integers of the dtype's size. Numbers are sent so: a CPU would send 16 bits as f32."""
        return np.dtype(f"u{self.dtype.itemsize}")


class Exchange:
    """Sends tensors of a parameter that is cut over the devices of several processes.

    All processes call `send` with the same arguments, in the same order. Where a process has all
    parts, nothing is sent.
    """

    def __init__(self, array: jax.Array, form: Form, *, homes: Sequence[int] | None = None) -> None:
        """Takes a parameter on the devices of a mesh. `homes` are their processes, by default as
        jax has them.

        Raises:
          ValueError: if the processes have different numbers of devices.
        """
        assert isinstance(array.sharding, NamedSharding)
        devices = [*array.sharding.mesh.devices.flat]
        self._homes = [d.process_index for d in devices] if homes is None else homes
        parts = array.sharding.devices_indices_map(array.shape)
        # In a tensor, whose layer does not count.
        self._places = [_place(parts[d], array.shape)[form.stacked :] for d in devices]
        self._groups = _make_groups(self._places, self._homes)
        self._group = {device: group for group in self._groups for device in group}
        self._number = {device: i for i, device in enumerate(devices)}
        shape = array.shape[1:] if form.stacked else array.shape
        self._shape = (*shape[:-2], shape[-1], shape[-2]) if form.transposed else shape
        self._array, self._form = array, form
        self._program = _program(array.sharding, self._groups, form)

    def send(self, wanted: Mapping[int, int]) -> jax.Array:
        """Starts to send to each process the layer that it wants, and others whatever comes."""
        return self._program(self._array, self._table(wanted))

    def lower(self, wanted: Mapping[int, int]) -> Any:
        """Lowers the program of `send`, as `jax.jit`'s method does."""
        return self._program.lower(self._array, self._table(wanted))

    def copy(self, sent: jax.Array) -> dict[int, jax.Array]:
        """Starts to copy to the host what this process's devices received, each its own part;
        returns the parts by the device's number in the mesh."""
        parts = {self._number[shard.device]: shard.data for shard in sent.addressable_shards}
        for data in parts.values():
            data.copy_to_host_async()
        return parts

    def receive(self, parts: Mapping[int, jax.Array]) -> np.ndarray:
        """Waits for the parts that `copy` returns; assembles the process's tensor of them."""
        out = np.empty(self._shape, self._form.bits)
        seen = set[_Place]()
        for device, data in parts.items():
            for part, source in zip(np.asarray(data), self._group[device], strict=True):
                if (place := self._places[source]) not in seen:
                    seen.add(place)
                    out[self._own(place)] = part
        return out.view(self._form.dtype)

    def _table(self, wanted: Mapping[int, int]) -> np.ndarray:
        """Returns, for each device, the layers that it sends to those of its group."""
        return np.asarray(
            [
                [wanted.get(self._homes[to], 0) for to in self._group[device]]
                for device in range(len(self._homes))
            ],
            np.int32,
        )

    def _own(self, place: _Place) -> tuple[slice, ...]:
        """Returns the index in a Hugging Face tensor of what lies at a place."""
        index = [slice(*ends) for ends in place]
        if self._form.transposed:
            index[-2:] = index[:-3:-1]
        return tuple(index)


def _place(index: Sequence[slice], shape: Sequence[int]) -> _Place:
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def _make_groups(places: Sequence[Any], homes: Sequence[int]) -> Groups:
    """Puts devices in groups, so that the processes of a group's devices have all parts between
    them: as few as there are, if others have the same parts."""
    devices = {home: [i for i, h in enumerate(homes) if h == home] for home in dict.fromkeys(homes)}
    if len({len(own) for own in devices.values()}) > 1:
        counts = ", ".join(f"{len(own)} in process {home}" for home, own in devices.items())
        raise ValueError(
            f"the processes have different numbers of devices: {counts}; give each the same"
        )
    holders: dict[frozenset[Any], list[int]] = {}
    for home, own in devices.items():
        holders.setdefault(frozenset(places[i] for i in own), []).append(home)
    regular = len({len(alike) for alike in holders.values()}) == 1
    if regular and sum(map(len, holders)) == len(set(places)):
        sets = [*zip(*holders.values(), strict=True)]
    else:  # some processes share a part of their parts
        sets = [tuple(devices)]
    return tuple(
        group for together in sets for group in zip(*(devices[h] for h in together), strict=True)
    )


@functools.cache
def _program(sharding: NamedSharding, groups: Groups, form: Form) -> Any:
    axes, spec = sharding.mesh.axis_names, sharding.spec
    if form.stacked:  # all layers on each device
        spec = PartitionSpec(None, *spec[1:])

    def on_device(own: jax.Array, table: jax.Array) -> jax.Array:
        layers = table[lax.axis_index(axes)]
        if form.stacked:
            tensors = jnp.take(own, layers, axis=0, mode="clip")
        else:
            tensors = jnp.broadcast_to(own, (len(layers), *own.shape))
        tensors = (tensors.swapaxes(-1, -2) if form.transposed else tensors).astype(form.dtype)
        tensors = lax.bitcast_convert_type(tensors, form.bits)
        if len(layers) == 1:
            return tensors
        return lax.all_to_all(tensors, axes, 0, 0, axis_index_groups=groups)

    return jit(
        jax.shard_map(
            on_device,
            mesh=sharding.mesh,
            in_specs=(spec, PartitionSpec()),
            out_specs=PartitionSpec(axes),
            check_vma=False,
        )
    )
