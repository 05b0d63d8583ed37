"""MXFP4 tensors of a checkpoint, read as bf16.

Groups of 32 numbers share an exponent (OCP Microscaling Formats 1.0). A file holds them as two
tensors of bytes: `NAME_blocks` [..., out, in / 32, 16], two numbers in a byte, and `NAME_scales`
[..., out, in / 32]. They stand for the tensor `NAME` [..., in, out].
"""

import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl.huggingface.files import StoredTensor, Tensor

_GROUP = 32  # numbers with one exponent
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class PackedTensor(NamedTuple):
    """A tensor of an open file in MXFP4, read on demand; see `StoredTensor`."""

    path: Path
    name: str
    blocks: StoredTensor
    scales: StoredTensor

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor as it is read."""
        return 2 * _GROUP * math.prod(self.scales.shape)

    def read(self, *, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Reads the tensor in bf16, [..., in, out].

        Raises:
          ValueError: if blocks or scales do not have the shape of such a tensor, or are not bytes.
        """
        *rows, groups = self.scales.shape
        found = (*rows[:-1], groups * _GROUP, *rows[-1:])
        if shape not in (None, found):
            raise ValueError(
                f"{self.path}: tensor {self.scales.name!r} has shape {self.scales.shape}, which "
                f"makes {self.name!r} {found}; expected {shape}"
            )
        scales = self.scales.read(dtypes=("U8",))
        blocks = self.blocks.read(shape=(*self.scales.shape, _GROUP // 2), dtypes=("U8",))
        return unpack(blocks, scales).swapaxes(-1, -2)


def join_packed(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Replaces blocks and scales by `PackedTensor`s; `names` lists the tensors that may have
    them."""
    joined = dict(tensors)
    for name in names:
        blocks, scales = (tensors.get(f"{name}_{part}") for part in ("blocks", "scales"))
        if isinstance(blocks, StoredTensor) and isinstance(scales, StoredTensor):
            joined[name] = PackedTensor(blocks.path, name, blocks, scales)
            del joined[blocks.name], joined[scales.name]
    return joined


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Computes the numbers of MXFP4 bytes: u8[..., G, 16] and u8[..., G] -> bf16[..., 32 * G]."""
    out = np.empty((*blocks.shape[:-1], _GROUP // 2), np.uint32)
    for i in np.ndindex(blocks.shape[:1]):  # expert by expert, because the indices are wide
        pairs = scales[i][..., None].astype(np.uint16) << 8 | blocks[i]
        np.take(_pairs(), pairs, out=out[i], mode="clip")  # "raise", the default, copies
    return out.view(jnp.bfloat16).reshape(*scales.shape[:-1], -1)


@functools.cache
def _pairs() -> np.ndarray:
    """Makes the table of pairs of bf16 numbers by exponent and byte, as u32[2 ** 16]."""
    exponents = np.arange(256)
    numbers = np.array([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)
    with np.errstate(over="ignore"):  # for exponents that no checkpoint has
        scaled = np.ldexp(numbers, exponents[:, None] - 127).astype(jnp.bfloat16)
    scaled[255] = np.nan
    low, high = exponents & 15, exponents >> 4
    pairs = np.stack([scaled[:, low], scaled[:, high]], axis=-1)
    return np.ascontiguousarray(pairs).view(np.uint32).reshape(-1)
