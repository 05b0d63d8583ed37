"""FP8 tensors of a checkpoint, read as bf16.

The numbers of a block, mostly 128 x 128, share a factor (arXiv:2412.19437). A file holds the
numbers as `NAME` in E4M3, [out, in], and the factors as `NAME_scale_inv`, [ceil(out / rows of a
block), ceil(in / columns of a block)].
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl.huggingface.config.quantization import Block
from jaxrl.huggingface.files import StoredTensor, Tensor, byte_starts

_DTYPE, _SUFFIX = "F8_E4M3", "_scale_inv"
_LARGEST = float(jnp.finfo(jnp.bfloat16).max) / float(jnp.finfo(jnp.float8_e4m3fn).max)
_VALUES = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)


class ScaledTensor(NamedTuple):
    """A tensor of an open file in FP8, read on demand; see `StoredTensor`."""

    path: Path
    name: str
    numbers: StoredTensor
    scales: StoredTensor
    start: int  # offset of the numbers in the file, in bytes
    block: Block

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor as it is read."""
        return 2 * math.prod(self.numbers.shape)

    def read(self, *, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Reads the tensor in bf16, [out, in].

        Raises:
          ValueError: if numbers or factors do not have the shape of such a matrix, or a factor is
            too large for bf16.
        """
        found, grid = self.numbers.shape, self.scales.shape
        if len(found) != 2 or shape not in (None, found):
            raise ValueError(
                f"{self.path}: tensor {self.name!r} has shape {found}, expected "
                f"{'a matrix' if shape is None else shape}"
            )
        blocks = tuple(-(-n // size) for n, size in zip(found, self.block, strict=True))
        if grid != blocks:
            raise ValueError(
                f"{self.scales.path}: tensor {self.scales.name!r} has shape {grid}, expected "
                f"{blocks}: weight_block_size={list(self.block)} and {self.name!r} is {found}"
            )
        scales = self.scales.read().astype(np.float32)
        if not np.all(np.abs(scales) <= _LARGEST):
            raise ValueError(
                f"{self.scales.path}: tensor {self.scales.name!r} has factors that are not finite, "
                f"or more than {_LARGEST:.3g}"
            )
        numbers = np.fromfile(self.path, np.uint8, math.prod(found), offset=self.start)
        return dequantise(numbers.reshape(found), scales, block=self.block)


def dequantise(numbers: np.ndarray, scales: np.ndarray, *, block: Block) -> np.ndarray:
    """Multiplies the numbers of E4M3 bytes u8[out, in] by the factors of their blocks f32[...]:
    bf16[out, in], each product rounded once."""
    out = np.empty(numbers.shape, jnp.bfloat16)
    for i, factors in enumerate(scales):  # block by block: f32 takes four times the memory
        rows = slice(i * block[0], (i + 1) * block[0])
        wide = np.repeat(factors, block[1])[: numbers.shape[1]]
        out[rows] = _VALUES[numbers[rows]] * wide
    return out


def join_scaled(tensors: Mapping[str, Tensor], *, block: Block) -> dict[str, Tensor]:
    """Replaces numbers and factors by `ScaledTensor`s.

    Raises:
      ValueError: for a tensor in FP8 without factors, or factors of a tensor that is not in FP8.
    """
    joined, starts = dict(tensors), dict[Path, Mapping[str, int]]()
    stored = {name: one for name, one in tensors.items() if isinstance(one, StoredTensor)}
    for name, one in stored.items():
        scales, numbers = stored.get(name + _SUFFIX), one.dtype == _DTYPE
        if numbers != (scales is not None):
            raise ValueError(
                f"{one.path}: tensor {name!r} in {one.dtype} has {'no ' * numbers}factors "
                f"{name + _SUFFIX!r}; expected some for tensors in {_DTYPE} and for no others"
            )
        if scales is not None:
            path = one.path
            starts[path] = starts.get(path) or byte_starts(path)
            joined[name] = ScaledTensor(path, name, one, scales, starts[path][name], block)
            del joined[scales.name]
    return joined
