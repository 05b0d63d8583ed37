"""Tensors of 8 bits and their factors, as vLLM reads them: what `blocks` of a dtype policy computes
with, in files.

`e4m3` is FP8 with the factors of 128 x 128 blocks (`NAME_scale_inv`, see `tensors.fp8`), and
`int8` is compressed-tensors' W8A8 with a factor for each row (`NAME_scale`). Activations are
rounded as vLLM computes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxrl.core.blocks import BLOCK, MATRICES, numbers_and_factors
from jaxrl.core.compiled import jit_forward
from jaxrl.models.integers import quantise
from jaxrl.models.spec import ParamSpec

_FACTORS = {"e4m3": "_scale_inv", "int8": "_scale"}  # what the names of factors end in
_ROUND = {"e4m3": jit_forward(numbers_and_factors), "int8": jit_forward(quantise)}


def matrices(flat: Mapping[str, ParamSpec], *, blocks: str) -> set[str]:
    """Lists the Hugging Face names of a decoder's tensors in 8 bits.

    Raises:
      ValueError: for an unknown kind of `blocks`, a decoder whose experts share a tensor, or a
        matrix in E4M3 that transformers would misread.
    """
    if blocks not in _FACTORS:
        raise ValueError(f"blocks={blocks} has no files; use one of {', '.join(_FACTORS)}")
    found = {path: one for path, one in flat.items() if path.split("/")[-1] in MATRICES}
    if joint := [path for path, one in found.items() if len(one.tensor_shape) != 2]:
        raise ValueError(
            f"blocks={blocks}: {joint[0]} is one tensor for many matrices; leave it out"
        )
    for one in found.values() if blocks == "e4m3" else ():
        if wrong := [size for size in one.tensor_shape if _misread(size)]:
            raise ValueError(
                f"blocks=e4m3: {one.hf_names()[0]!r} is {one.tensor_shape}, and of {wrong[0]} "
                f"numbers transformers makes blocks of {wrong[0] // -(-wrong[0] // BLOCK)} instead "
                f"of {BLOCK}: it would misread the file without an error; leave blocks out"
            )
    return {name for one in found.values() for name in one.hf_names()}


def _misread(size: int) -> bool:
    """Tells whether transformers (5.23) takes another size of blocks from the number of factors of
    an axis. It is an error there if that number does not divide the axis."""
    count = -(-size // BLOCK)
    return count > 1 and size % BLOCK != 0 and size % count == 0


def in_eight_bits(
    tensors: Iterable[tuple[str, np.ndarray]], names: set[str], *, blocks: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Replaces each of the named tensors of a stream by its numbers and their factors, in this
    order."""
    for name, tensor in tensors:
        if name not in names:
            yield name, tensor
            continue
        numbers, factors = map(np.asarray, _ROUND[blocks](tensor))
        yield name, numbers
        yield name + _FACTORS[blocks], factors


def sizes(
    given: Mapping[str, int], flat: Mapping[str, ParamSpec], names: set[str], *, blocks: str
) -> dict[str, int]:
    """Lists the bytes of each tensor, as `in_eight_bits` orders them, from those before it."""
    shapes = {name: one.tensor_shape for one in flat.values() for name in one.hf_names()}
    found = dict[str, int]()
    for name, nbytes in given.items():
        found[name] = math.prod(shapes[name]) if name in names else nbytes
        if name in names:
            rows, columns = shapes[name]
            grid = -(-rows // BLOCK) * -(-columns // BLOCK) if blocks == "e4m3" else rows
            found[name + _FACTORS[blocks]] = 4 * grid
    return found


def quantization_config(
    flat: Mapping[str, ParamSpec], names: set[str], *, blocks: str
) -> dict[str, Any]:
    """Makes the `quantization_config` of config.json. It names the matrices that stay as they
    are."""
    others = {
        name.removesuffix(".weight")
        for one in flat.values()
        for name in one.hf_names()
        if len(one.tensor_shape) == 2 and name not in names and name.endswith(".weight")
    }
    kept = sorted({"lm_head", *others})
    if blocks == "e4m3":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "scale_fmt": "ue8m0",  # factors are powers of two, of activations too
            "modules_to_not_convert": kept,
        }
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": kept,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": eight | {"strategy": "channel", "dynamic": False},
                "input_activations": eight | {"strategy": "token", "dynamic": True},
            }
        },
    }
