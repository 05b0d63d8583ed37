"""Weight source over the learner's parameters, as Hugging Face tensors."""

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from jax import lax

from jaxrl.bridge.base import TensorSpec
from jaxrl.bridge.exchange import Exchange, Form
from jaxrl.core.casts import dtype_of
from jaxrl.core.compiled import jit
from jaxrl.core.precision import DType
from jaxrl.models import spec
from jaxrl.models.spec import Params, ParamSpec, Specs

# Tensors that are converted and on their way to the host while an earlier one is written.
_AHEAD = 2

_Fetch = Callable[[], Any]  # waits for a layer's tensors; returns them in one array


class ParamsSource:
    """A `WeightSource` over the learner's parameters, or a copy of them on the host.

    Tensors are unstacked from the layers and cast on the device one by one. Each device copies its
    own part to its host. A single process sends nothing between devices. With several, all must
    iterate, in the same order, and each device sends its part to the process that yields the
    tensor (`exchange`); no device receives a whole one. A device holds its parts of at most three
    tensors besides the parameters (the experts of a layer count as one), twice while they are
    sent, and none where nothing must be cast or sent. On a CPU the yielded arrays are the device's,
    so the arrays that the caller keeps count as well. Do not donate the parameters before iteration
    ends.

    The first `processes` of the run yield the tensors, each a part of about equal size; the others
    yield none. Raises ValueError if parameters and specs do not have the same names, or as
    `Exchange`.
    """

    def __init__(self, params: Params, specs: Specs, *, dtype: DType, processes: int = 1) -> None:
        flat = traverse_util.flatten_dict(params, sep="/")
        declared = spec.flatten(specs)
        if flat.keys() != declared.keys():
            odd = sorted(flat.keys() ^ declared.keys())
            raise ValueError(f"parameters and specs differ in {', '.join(map(str, odd))}")
        self._parts = [(flat[path], part, dtype_of(path, dtype)) for path, part in declared.items()]
        self._owners = _divide([part for _, part, _ in self._parts], processes)
        self._index = jax.process_index()

    def specs(self) -> list[TensorSpec]:
        """See `WeightSource.specs`."""
        return [
            TensorSpec(name, part.tensor_shape, dtype.name)
            for (_, part, dtype), owners in zip(self._parts, self._owners, strict=True)
            for names, owner in zip(layers(part), owners, strict=True)
            for name in names * (owner == self._index)
        ]

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        ahead: deque[tuple[ParamSpec, list[str], _Fetch]] = deque()
        for one in self._take():
            ahead.append(one)
            if len(ahead) > _AHEAD:
                yield from _named(*ahead.popleft())
        while ahead:
            yield from _named(*ahead.popleft())

    def _take(self) -> Iterator[tuple[ParamSpec, list[str], _Fetch]]:
        """Yields layers of the parameters, on their way to the host: the parameter's spec, the
        names of a layer's tensors and the function that waits for them in one array. With several
        processes each has a layer of its own at a time, or no names."""
        for (array, part, dtype), owners in zip(self._parts, self._owners, strict=True):
            start = _starter(array, part, dtype)
            for wanted in _rounds(owners):
                layer = wanted.get(self._index)
                yield part, [] if layer is None else layers(part)[layer], start(wanted)


def layers(part: ParamSpec) -> list[list[str]]:
    """Returns the names of a parameter's tensors by layer."""
    names = part.hf_names()
    size = len(names) // (part.shape[0] if part.stacked else 1)
    return [names[i : i + size] for i in range(0, len(names), size)]


def _divide(parts: Sequence[ParamSpec], count: int) -> list[list[int]]:
    """Gives each layer to the process that has the fewest numbers so far, of `count`; returns the
    processes by parameter and layer."""
    loads = [0] * count
    found = list[list[int]]()
    for part in parts:
        found.append([])
        for names in layers(part):
            owner = loads.index(min(loads))
            loads[owner] += len(names) * math.prod(part.tensor_shape)
            found[-1].append(owner)
    return found


def _rounds(owners: Sequence[int]) -> Iterator[dict[int, int]]:
    """Puts consecutive layers of different processes together; yields layers by process."""
    wanted = dict[int, int]()
    for layer, owner in enumerate(owners):
        if owner in wanted:
            yield wanted
            wanted = {}
        wanted[owner] = layer
    yield wanted


def _named(part: ParamSpec, names: list[str], fetch: _Fetch) -> Iterator[tuple[str, np.ndarray]]:
    array = fetch()  # without names, too: otherwise tensors would pile up on the devices
    if names:
        yield from zip(names, array.reshape(-1, *part.tensor_shape), strict=True)


def _starter(array: Any, part: ParamSpec, dtype: DType) -> Callable[[Mapping[int, int]], _Fetch]:
    """Returns a function that starts to fetch layers, given by process, and returns another one
    that waits for this process's."""
    form = Form(bool(part.stacked), part.transposed, dtype)
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return functools.partial(_exchanged, Exchange(array, form))
    here = jax.process_index()
    if _on_host(array) and array.dtype == dtype:
        host = np.asarray(array)  # a view, not a copy
        return lambda wanted: lambda: part.swap(host[wanted.get(here, 0)] if form.stacked else host)
    convert = _converter(form)
    return lambda wanted: _copied(convert(array, wanted.get(here, 0)))


def _on_host(array: Any) -> bool:
    """Tells if NumPy can read an array without a copy."""
    if isinstance(array, np.ndarray):
        return True
    return len(array.sharding.device_set) == 1 and next(iter(array.devices())).platform == "cpu"


def _copied(array: jax.Array) -> _Fetch:
    array.copy_to_host_async()
    return lambda: np.asarray(array)


def _exchanged(exchange: Exchange, wanted: Mapping[int, int]) -> _Fetch:
    sent = exchange.send(wanted)
    if jax.process_index() not in wanted:
        return lambda: jax.block_until_ready(sent)
    own = exchange.copy(sent)
    return lambda: exchange.receive(own)


@functools.cache
def _converter(form: Form) -> Callable[..., Any]:
    def convert(array: jax.Array, i: jax.Array) -> jax.Array:
        tensor = lax.dynamic_index_in_dim(array, i, keepdims=False) if form.stacked else array
        return (tensor.swapaxes(-1, -2) if form.transposed else tensor).astype(form.dtype)

    return jit(convert)
