"""Publishes a learner's weights into vLLM's TPU engine in the same process, on the devices.

The engine's compiled steps take its weights as an argument. A publish puts new arrays there, one
tensor at a time; no weight passes through the host.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from flax import traverse_util
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxrl.bridge.base import PoisonedError, RefusedError
from jaxrl.bridge.source import layers
from jaxrl.bridge.tpu_engine.digest import digest, digester
from jaxrl.bridge.tpu_engine.rules import Place, places
from jaxrl.core.casts import as_served
from jaxrl.core.compiled import jit
from jaxrl.core.precision import Precision
from jaxrl.models import spec
from jaxrl.models.families import DecoderConfig
from jaxrl.models.spec import Params, Specs


class LiveEngine(Protocol):
    """The part of an engine that a publish uses; `jaxrl.sampling.TpuEngine` has it."""

    def leaves(self) -> Mapping[str, jax.Array]:
        """Returns the arrays of the engine's model by name."""
        ...

    def served(self) -> Mapping[str, jax.Array]:
        """Returns the arrays that its compiled steps take, by the same names."""
        ...

    def write(self, leaf: str, array: jax.Array) -> None:
        """Replaces an array of the model and frees the old one."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forgets the prefixes in the KV cache; returns False if requests hold some of it."""
        ...

    def start_weight_update(self) -> None:
        """Frees the KV cache."""
        ...

    def refresh(self) -> None:
        """Makes the compiled steps take the model's present arrays."""
        ...

    def finish_weight_update(self) -> None:
        """Allocates the KV cache."""
        ...


class _Leaf(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding


class EnginePublisher:
    """Writes whole versions of the weights into an engine's arrays.

    After each publish, a digest of every array that the engine serves is compared with that of the
    learner's tensor, rounded as every publish rounds it (`wire`, then `sampler`). At its peak a
    publish needs one tensor more than the two copies of the weights; the KV cache is freed
    meanwhile.
    """

    def __init__(
        self, engine: LiveEngine, specs: Specs, *, config: DecoderConfig, precision: Precision | str
    ) -> None:
        """Makes the publisher of a decoder with these `specs` and this `config`, for which
        `engine_refusal` has no reason.

        Raises:
          RefusedError: if the engine's arrays are not those that the rules expect.
        """
        self._engine, self._config = engine, config
        self._precision = Precision.of(precision)
        self._specs = spec.flatten(specs)
        found = engine.leaves()
        dtype = self._precision.sampler.name
        self._expected = {
            place.leaf: _Leaf(place.shape, dtype, found[place.leaf].sharding)
            for _, _, place in self._places()
            if place.leaf in found
        }
        self._check_leaves()

    def check(self, params: Params) -> None:
        """Refuses a publish before it begins.

        Raises:
          RefusedError: if requests are running, or if an array of the engine has another name,
            shape, dtype or sharding than expected.
          ValueError: if `params` and the specs do not have the same names.
        """
        odd = sorted(self._specs.keys() ^ traverse_util.flatten_dict(params, sep="/").keys())
        if odd:
            raise ValueError(f"parameters and specs differ in {', '.join(map(str, odd))}")
        self._check_leaves()
        if not self._engine.reset_prefix_cache():
            raise RefusedError(
                "vLLM's TPU engine still has requests, whose KV cache belongs to the old weights; "
                "finish or close the iterations over their completions first"
            )

    def write(self, params: Params) -> None:
        """Writes all weights. Call `check` before; no request may run meanwhile.

        Raises:
          PoisonedError: if the engine serves something else than the learner's weights.
          Exception: any error of a transfer; the engine then has a mixture of weights.
        """
        flat = traverse_util.flatten_dict(params, sep="/")
        engine, wanted = self._engine, dict[str, Any]()
        strides = dict[str, tuple[int, ...]]()
        engine.start_weight_update()
        for path, layer, place in self._places():
            part = self._specs[path]
            convert = _converter(bool(part.stacked), place.split, place.order, self._precision)
            value, wanted[place.leaf] = convert(flat[path], layer)
            engine.write(place.leaf, _move(value, self._expected[place.leaf].sharding))
            strides[place.leaf] = place.strides
        engine.refresh()
        held = {leaf: digester(strides[leaf])(array) for leaf, array in engine.served().items()}
        wanted, held = jax.device_get((wanted, held))
        odd = [leaf for leaf in wanted if not np.array_equal(wanted[leaf], held.get(leaf))]
        if odd:
            raise PoisonedError(
                f"vLLM's TPU engine serves other numbers than the learner sent in {len(odd)} of "
                f"{len(wanted)} arrays, such as {odd[0]}"
            )
        engine.finish_weight_update()

    def _places(self) -> Iterator[tuple[str, int, Place]]:
        """Yields every leaf: the path of its parameter, the layer in it, and its place."""
        for path, part in self._specs.items():
            for layer, names in enumerate(layers(part)):
                for name in names:
                    for place in places(name, part.tensor_shape, config=self._config):
                        yield path, layer, place

    def _check_leaves(self) -> None:
        found = {
            leaf: _Leaf(array.shape, array.dtype.name, array.sharding)
            for leaf, array in self._engine.leaves().items()
        }
        needed = {place.leaf for _, _, place in self._places()}
        if odd := sorted(found.keys() ^ needed):
            side = "more" if odd[0] in found else "fewer"
            raise RefusedError(
                f"vLLM's TPU engine has {side} arrays than the model: {', '.join(odd[:3])}; this "
                "version of vllm-tpu has another layout than jaxrl's rules"
            )
        for leaf, one in found.items():
            if one != self._expected[leaf]:
                raise RefusedError(
                    f"vLLM's TPU engine: {leaf} is {one.dtype}{list(one.shape)} with "
                    f"{one.sharding}; expected {self._expected[leaf].dtype}"
                    f"{list(self._expected[leaf].shape)} with {self._expected[leaf].sharding}"
                )


@functools.cache
def _converter(
    stacked: bool, split: tuple[int, ...], order: tuple[int, ...], precision: Precision
) -> Any:
    """Returns the compiled function from a parameter and a layer to the leaf and its digest."""

    def convert(array: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        tensor = lax.dynamic_index_in_dim(array, layer, keepdims=False) if stacked else array
        tensor = as_served(tensor, precision)
        rows = Place("", tensor.shape, tuple(range(tensor.ndim))).strides
        return tensor.reshape(split).transpose(order), digest(tensor, rows)

    return jit(convert)


def _move(value: jax.Array, sharding: Sharding) -> jax.Array:
    """Moves an array to a sharding, from device to device.

    `jax.device_put` divides an array of several devices anew through the host, unless only their
    order changes.
    """
    now = value.sharding
    if len(now.device_set) == 1:
        return jax.device_put(value, sharding)
    assert isinstance(now, NamedSharding)
    if now.device_set != sharding.device_set:
        whole = NamedSharding(now.mesh, PartitionSpec())
        return jax.device_put(_resharder(whole)(value).addressable_shards[0].data, sharding)
    assert isinstance(sharding, NamedSharding)
    if np.array_equal(now.mesh.devices.flat, sharding.mesh.devices.flat):
        return _resharder(sharding)(value)
    return jax.device_put(value, sharding)


@functools.cache
def _resharder(sharding: Sharding) -> Any:
    return jit(lambda x: x, out_shardings=sharding)
