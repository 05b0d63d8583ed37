"""Where tensors lie in a payload's files, which are safetensors files.

The format (huggingface/safetensors): eight bytes with the length of a JSON header, the header, and
the tensors' bytes without gaps. Written here tensor by tensor, because the library's writer wants
all of them at once.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.bridge.base import TensorSpec
from jaxrl.bridge.manifest import ITEM_BYTES

_TO_FORMAT = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_FROM_FORMAT = {code: dtype for dtype, code in _TO_FORMAT.items()}
_ALIGNMENT = 64


class File(NamedTuple):
    """A file to be written.

    Attributes:
      name: in the payload's directory.
      head: the bytes before the first tensor.
      places: (tensor, offset of its first byte in the file), in order.
      nbytes: size of the file.
    """

    name: str
    head: bytes
    places: tuple[tuple[TensorSpec, int], ...]
    nbytes: int


def size(spec: TensorSpec) -> int:
    """Bytes of a tensor."""
    return math.prod(spec.shape) * ITEM_BYTES[spec.dtype]


def plan(specs: Sequence[TensorSpec], *, max_file_bytes: int | None = None) -> list[File]:
    """Distributes tensors over files, in order; one file where no limit is given.

    A tensor larger than the limit gets a file of its own. Names are Hugging Face's:
    model.safetensors, or model-00001-of-00002.safetensors and so on.
    """
    groups: list[list[TensorSpec]] = [[]]
    room = math.inf if max_file_bytes is None else max_file_bytes
    for spec in specs:
        if groups[-1] and sum(map(size, groups[-1])) + size(spec) > room:
            groups.append([])
        groups[-1].append(spec)
    if len(groups) == 1:
        return [_file("model.safetensors", groups[0])]
    return [
        _file(f"model-{i:05}-of-{len(groups):05}.safetensors", group)
        for i, group in enumerate(groups, start=1)
    ]


def index(files: Sequence[File]) -> str:
    """The text of model.safetensors.index.json, which a checkpoint of several files needs."""
    total = sum(size(spec) for file in files for spec, _ in file.places)
    where = {spec.name: file.name for file in files for spec, _ in file.places}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)


def read_specs(directory: Path) -> list[TensorSpec]:
    """Names, shapes and dtypes of all tensors in a checkpoint directory's safetensors files, except
    buffers of old exports that follow from the config; `models.huggingface` ignores them, too.

    Raises:
      ValueError: if there is no such file, one is not valid or holds another dtype.
    """
    listing = directory / "model.safetensors.index.json"
    if listing.exists():
        files = [directory / n for n in sorted(set(_json(listing)["weight_map"].values()))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} has no safetensors file")
    specs = [spec for file in files for spec in _read_header(file)]
    return [spec for spec in specs if not spec.name.endswith("rotary_emb.inv_freq")]


def _file(name: str, specs: Sequence[TensorSpec]) -> File:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = [], 0
    for spec in specs:
        starts.append(end)
        end += size(spec)
        header[spec.name] = {
            "dtype": _TO_FORMAT[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [starts[-1], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    places = tuple((spec, len(head) + start) for spec, start in zip(specs, starts, strict=True))
    return File(name, head, places, len(head) + end)


def _read_header(file: Path) -> list[TensorSpec]:
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        return [
            TensorSpec(name, tuple(item["shape"]), _FROM_FORMAT[item["dtype"]])
            for name, item in header.items()
            if name != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        raise ValueError(f"{file} is not a safetensors file of known dtypes: {error!r}") from None


def _json(path: Path) -> Any:
    return json.loads(path.read_text())
