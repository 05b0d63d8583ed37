"""Weights with an array of its own for each layer, as the sampler holds them on NVIDIA GPUs: out of
a stack, XLA copies a layer's weights there before each product."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.models.families import DecoderConfig
from jaxrl.models.spec import Params


def wants_unstacked(device: jax.Device, config: Any) -> bool:
    """Tells if a sampler on this device holds the weights of a model by layer."""
    return device.platform == "gpu" and isinstance(config, DecoderConfig)


def unstack(params: Params, config: DecoderConfig) -> Params:
    """Splits the stack of each group into a tuple of its layers, which `scan_layers` takes too."""
    return _split(params, config, lambda x, i: x[i])


def unstack_shapes(shapes: Params, config: DecoderConfig) -> Params:
    """Returns the shapes and shardings of what `unstack` returns, from those of stacks."""

    def one(x: Any, _: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=_of_layer(x.sharding))

    return _split(shapes, config, one)


def unstack_shardings(shardings: Params, config: DecoderConfig) -> Params:
    """Returns the shardings of what `unstack` returns, from those of stacks."""
    return _split(shardings, config, lambda x, _: _of_layer(x))


def _of_layer(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def _split(tree: Mapping[str, Any], config: DecoderConfig, take: Callable[[Any, int], Any]) -> Any:
    counts = {group.name: group.count for group in config.groups}

    def layer(part: Any, i: int) -> Any:
        return jax.tree.map(lambda x: take(x, i), part)

    return {
        name: tuple(layer(part, i) for i in range(counts[name])) if name in counts else part
        for name, part in tree.items()
    }
