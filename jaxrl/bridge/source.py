"""Weight source over the learner's parameters, as Hugging Face tensors."""

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.bridge.base import TensorSpec
from jaxrl.core.casts import dtype_of
from jaxrl.core.compiled import jit
from jaxrl.core.precision import DType
from jaxrl.models import spec
from jaxrl.models.spec import Params, ParamSpec, Specs

# Tensors that are converted and on their way to the host while an earlier one is written.
_AHEAD = 2


class ParamsSource:
    """A `WeightSource` over the learner's parameters.

    Tensors are unstacked from the layers and cast on the device one by one. Each device of a single
    process copies its own part to the host; nothing is sent between devices. With several
    processes, tensors are gathered from the mesh first, and all must iterate, in the same order.
    A device holds at most three tensors, or its parts of them, besides the parameters (the experts
    of a layer count as one), and none where nothing must be cast or gathered. On a CPU the yielded
    arrays are the device's, so the arrays that the caller keeps count as well. Do not donate the
    parameters before iteration ends.

    `share` = (index, count) divides the tensors into `count` parts of about equal size and yields
    one part; the other parts are gathered on the devices, but not fetched to the host. Raises
    ValueError if parameters and specs do not have the same names.
    """

    def __init__(
        self, params: Params, specs: Specs, *, dtype: DType, share: tuple[int, int] = (0, 1)
    ) -> None:
        flat = traverse_util.flatten_dict(params, sep="/")
        declared = spec.flatten(specs)
        if flat.keys() != declared.keys():
            odd = sorted(flat.keys() ^ declared.keys())
            raise ValueError(f"parameters and specs differ in {', '.join(map(str, odd))}")
        self._parts = [(flat[path], part, dtype_of(path, dtype)) for path, part in declared.items()]
        self._own = _divide([part for _, part, _ in self._parts], *share)

    def specs(self) -> list[TensorSpec]:
        """See `WeightSource.specs`."""
        return [
            TensorSpec(name, part.tensor_shape, dtype.name)
            for (_, part, dtype), own in zip(self._parts, self._own, strict=True)
            for names, mine in zip(layers(part), own, strict=True)
            for name in names * mine
        ]

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        ahead: deque[tuple[ParamSpec, list[str], Any]] = deque()
        for part, names, array in self._take():
            if names and isinstance(array, jax.Array):
                array.copy_to_host_async()
            ahead.append((part, names, array))
            if len(ahead) > _AHEAD:
                yield from _fetch(*ahead.popleft())
        while ahead:
            yield from _fetch(*ahead.popleft())

    def _take(self) -> Iterator[tuple[ParamSpec, list[str], Any]]:
        """Yields each layer of each parameter: the parameter's spec, the names of the layer's
        tensors, empty if another process fetches them, and the tensors in one array."""
        for (array, part, dtype), own in zip(self._parts, self._own, strict=True):
            prepare = _prepare(array, part, dtype)
            for i, (names, mine) in enumerate(zip(layers(part), own, strict=True)):
                yield part, names * mine, prepare(i)


def layers(part: ParamSpec) -> list[list[str]]:
    """Returns the names of a parameter's tensors by layer."""
    names = part.hf_names()
    size = len(names) // (part.shape[0] if part.stacked else 1)
    return [names[i : i + size] for i in range(0, len(names), size)]


def _divide(parts: Sequence[ParamSpec], index: int, count: int) -> list[list[bool]]:
    """Gives each layer to the part that has the fewest numbers so far; returns, by parameter and
    layer, True for the layers of part `index`."""
    loads = [0] * count
    found = list[list[bool]]()
    for part in parts:
        found.append([])
        for names in layers(part):
            owner = loads.index(min(loads))
            loads[owner] += len(names) * math.prod(part.tensor_shape)
            found[-1].append(owner == index)
    return found


def _fetch(part: ParamSpec, names: list[str], array: Any) -> Iterator[tuple[str, np.ndarray]]:
    if not names:
        jax.block_until_ready(array)  # otherwise gathers would pile up on the devices
        return
    yield from zip(names, np.asarray(array).reshape(-1, *part.tensor_shape), strict=True)


def _prepare(array: Any, part: ParamSpec, dtype: DType) -> Callable[[int], Any]:
    """Returns a function from a layer's index to its tensors, on the device or a host view."""
    on_host = len(array.sharding.device_set) == 1 and next(iter(array.devices())).platform == "cpu"
    if on_host and array.dtype == dtype:
        host = np.asarray(array)  # a view, not a copy
        return lambda i: part.swap(host[i] if part.stacked else host)
    whole = None
    if not array.is_fully_addressable:  # then the devices of a mesh
        whole = NamedSharding(array.sharding.mesh, PartitionSpec())
    convert = _converter(bool(part.stacked), part.transposed, dtype, whole)
    return lambda i: convert(array, i)


@functools.cache
def _converter(
    stacked: bool, transposed: bool, dtype: DType, sharding: NamedSharding | None
) -> Callable[..., Any]:
    def convert(array: jax.Array, i: jax.Array) -> jax.Array:
        tensor = lax.dynamic_index_in_dim(array, i, keepdims=False) if stacked else array
        return (tensor.swapaxes(-1, -2) if transposed else tensor).astype(dtype)

    return jit(convert, out_shardings=sharding)
