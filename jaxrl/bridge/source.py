"""The learner's parameters as Hugging Face tensors."""

import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.bridge.base import TensorSpec
from jaxrl.models import spec
from jaxrl.models.spec import Params, ParamSpec, Specs
from jaxrl.precision import DType

# Tensors that are being converted and gathered while the one before is written.
_AHEAD = 1


class ParamsSource:
    """A `WeightSource` over the learner's parameters.

    Tensors are unstacked from the layers, cast on the device and gathered from the mesh one at a
    time, so that at most two of them exist besides the parameters; where nothing has to be cast or
    gathered, none does. The parameters must not be donated before iteration ends. Over several
    processes all must iterate, in the same order.
    """

    def __init__(self, params: Params, specs: Specs, *, dtype: DType) -> None:
        flat = traverse_util.flatten_dict(params, sep="/")
        declared = spec.flatten(specs)
        if flat.keys() != declared.keys():
            odd = sorted(flat.keys() ^ declared.keys())
            raise ValueError(f"parameters and specs differ in {', '.join(map(str, odd))}")
        self._parts = [(flat[path], declared[path]) for path in declared]
        self._dtype = dtype

    def specs(self) -> list[TensorSpec]:
        """What iteration yields."""
        return [
            TensorSpec(name, part.shape[1:] if part.stacked else part.shape, self._dtype.name)
            for _, part in self._parts
            for name in part.hf_names()
        ]

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        ahead: deque[tuple[str, Any]] = deque()
        for name, take in self._tasks():
            ahead.append((name, take()))
            if len(ahead) > _AHEAD:
                yield _fetch(*ahead.popleft())
        while ahead:
            yield _fetch(*ahead.popleft())

    def _tasks(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        for array, part in self._parts:
            prepare = _prepare(array, part, self._dtype)
            for i, name in enumerate(part.hf_names()):
                yield name, functools.partial(prepare, i)


def _fetch(name: str, array: Any) -> tuple[str, np.ndarray]:
    return name, np.asarray(array)


def _prepare(array: Any, part: ParamSpec, dtype: DType) -> Callable[[int], Any]:
    """The function from a layer's index to its tensor, on the device or as a view on the host."""
    on_host = len(array.sharding.device_set) == 1 and next(iter(array.devices())).platform == "cpu"
    if on_host and array.dtype == dtype:
        host = np.asarray(array)  # the parameters' own memory
        return host.__getitem__ if part.stacked else lambda _: host
    mesh = array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    convert = _converter(part.stacked, dtype, whole)
    return lambda i: convert(array, i)


@functools.cache
def _converter(stacked: bool, dtype: DType, sharding: NamedSharding | None) -> Callable[..., Any]:
    def convert(array: jax.Array, i: jax.Array) -> jax.Array:
        tensor = lax.dynamic_index_in_dim(array, i, keepdims=False) if stacked else array
        return tensor.astype(dtype)

    return jax.jit(convert, out_shardings=sharding)
