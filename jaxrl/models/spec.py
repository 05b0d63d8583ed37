"""Declarations of parameters: shape, axes, initial value and Hugging Face name."""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util

from jaxrl.core.casts import dtype_of
from jaxrl.core.precision import DType


class ParamSpec(NamedTuple):
    """Declaration of one parameter.

    Matrices keep Hugging Face's orientation, [out, in], contracted on the last axis. Parameters of
    layers are stacked along a first dimension, with the axis "layers", and parameters of experts
    along a second one, with the axis "experts".

    The key of a parameter that every policy holds in f32 ends in "_f32", see `casts.dtype_of`.

    Attributes:
      shape: includes the leading dimensions of layers and experts.
      axes: logical name of each dimension; sharding rules map them to mesh axes.
      name: Hugging Face's name, with "{layer}" and "{expert}" for their indices.
      scale: standard deviation of the normal initial value; 0 gives zeros and None ones.
      first: index of the first of its layers.
      step: distance between the indices of its layers.
      transposed: true if Hugging Face's tensor has the last two dimensions swapped, [in, out].
        Such a tensor may be packed, see `mxfp4`.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    name: str
    scale: float | None
    first: int = 0
    step: int = 1
    transposed: bool = False

    @property
    def counted(self) -> int:
        """Number of leading dimensions that count layers and experts, not numbers of a matrix."""
        return sum(axis in ("layers", "experts") for axis in self.axes)

    @property
    def stacked(self) -> int:
        """Number of leading dimensions along which Hugging Face has separate tensors."""
        return ("{layer}" in self.name) + ("{expert}" in self.name)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each Hugging Face tensor."""
        shape = self.shape[self.stacked :]
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    def swap(self, array: Any) -> Any:
        """Converts an array from the parameter's orientation to Hugging Face's, or back."""
        return array.swapaxes(-1, -2) if self.transposed else array

    def hf_names(self) -> list[str]:
        """Lists the Hugging Face tensors that this parameter stacks: by layer, then by expert."""
        counts = zip((self.first, 0), (self.step, 1), self.shape[: self.stacked], strict=False)
        indices = itertools.product(
            *(range(first, first + step * count, step) for first, step, count in counts)
        )
        fields = ("layer", "expert")
        return [self.name.format(**dict(zip(fields, index, strict=False))) for index in indices]


Specs = Mapping[str, Any]
"""Nested dicts with `ParamSpec` leaves."""

Params = dict[str, Any]
"""The nesting of `Specs` with arrays as leaves."""


def is_spec(x: Any) -> bool:
    """Recognises leaves in tree maps over specs; the leaves are tuples."""
    return isinstance(x, ParamSpec)


def flatten(specs: Specs) -> dict[str, ParamSpec]:
    """Flattens specs to {"layers/q": spec, ...}, the paths used in error messages."""
    flat: dict[str, Any] = traverse_util.flatten_dict(dict(specs), sep="/")
    return flat


def parameter_count(specs: Specs) -> int:
    """Counts all parameters of a model."""
    return sum(math.prod(one.shape) for one in flatten(specs).values())


def init(specs: Specs, key: jax.Array, *, dtype: DType) -> Params:
    """Draws random parameters of the declared shapes, with an independent key for each."""
    flat = flatten(specs)
    keys = jax.random.split(key, len(flat))

    def one(path: str, key: jax.Array) -> jax.Array:
        spec, own = flat[path], dtype_of(path, dtype)
        if spec.scale is None:
            return jnp.ones(spec.shape, own)
        return _normal(key, spec.scale, shape=spec.shape, dtype=own)

    values = {path: one(path, key) for path, key in zip(flat, keys, strict=True)}
    return traverse_util.unflatten_dict(values, sep="/")


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: jax.Array, scale: float, *, shape: tuple[int, ...], dtype: DType) -> jax.Array:
    # One program per shape. Without the barrier XLA folds `scale` into the factors of `normal`, and
    # the last bit differs from running the steps one by one.
    drawn = jax.lax.optimization_barrier(jax.random.normal(key, shape, jnp.float32))
    return (scale * drawn).astype(dtype)


def abstract(specs: Specs, *, dtype: DType) -> Params:
    """Returns shapes and dtypes without allocating."""
    flat = {
        path: jax.ShapeDtypeStruct(one.shape, dtype_of(path, dtype))
        for path, one in flatten(specs).items()
    }
    return traverse_util.unflatten_dict(flat, sep="/")
