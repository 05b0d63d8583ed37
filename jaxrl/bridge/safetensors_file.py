"""Layout of a payload's safetensors files.

The format (huggingface/safetensors) is eight bytes with the length of a JSON header, the header,
and the tensors' bytes without gaps. Files are written here tensor by tensor: the library's writer
needs all tensors in memory at once.
"""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from jaxrl.bridge.base import TensorSpec
from jaxrl.bridge.manifest import ManifestEntry, tensor_bytes

_TO_FORMAT = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_FROM_FORMAT = {code: dtype for dtype, code in _TO_FORMAT.items()}
_ALIGNMENT = 64


class SafetensorsFile(NamedTuple):
    """Contents of a file to be written."""

    name: str  # in the payload's directory
    header: bytes  # before the first tensor
    entries: tuple[ManifestEntry, ...]  # its tensors, in order
    nbytes: int  # of the whole file


def plan_file(specs: Sequence[TensorSpec], *, name: str = "model.safetensors") -> SafetensorsFile:
    """Returns the file that holds tensors in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends = list(itertools.accumulate(map(tensor_bytes, specs), initial=0))
    for spec, offsets in zip(specs, itertools.pairwise(ends), strict=True):
        dtype, shape = _TO_FORMAT[spec.dtype], list(spec.shape)
        entries[spec.name] = {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    found = [
        ManifestEntry(*spec, name, len(header) + end)
        for spec, end in zip(specs, ends, strict=False)
    ]
    return SafetensorsFile(name, header, tuple(found), len(header) + ends[-1])


def read_specs(directory: Path) -> list[TensorSpec]:
    """Reads names, shapes and dtypes of all tensors of a safetensors checkpoint.

    Skips the rotary buffers of old exports, as `jaxrl.huggingface` does. Raises ValueError if there
    is no safetensors file, or one is invalid or holds another dtype.
    """
    listing = directory / "model.safetensors.index.json"
    if listing.exists():
        try:
            names = set(json.loads(listing.read_text())["weight_map"].values())
            files = [directory / name for name in sorted(names)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{listing} is not a list of files: {error!r}") from None
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} has no safetensors file")
    specs = [spec for file in files for spec in _read_header(file)]
    return [spec for spec in specs if not spec.name.endswith("rotary_emb.inv_freq")]


def _read_header(file: Path) -> list[TensorSpec]:
    try:
        with safe_open(file, framework="numpy") as tensors:
            parts = [(name, tensors.get_slice(name)) for name in tensors.keys()]  # noqa: SIM118
        return [
            TensorSpec(name, tuple(part.get_shape()), _FROM_FORMAT[part.get_dtype()])
            for name, part in parts
        ]
    except (OSError, KeyError, SafetensorError) as error:
        raise ValueError(f"{file} is not a safetensors file of known dtypes: {error!r}") from None
