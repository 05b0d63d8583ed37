"""Manifest of a payload: its version, and name, shape, location and checksum of every tensor."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl.bridge.base import TensorSpec

FILE = "manifest.json"
FORMAT = 1
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# The checksum adds 64-bit words in columns, 256 rows per chunk, and hashes the sums. It runs at
# memory speed and detects any changed, moved or torn word. The number of columns is prime, so that
# rows of a matrix do not coincide with rows of the chunk.
_COLUMNS = 1021
CHUNK_BYTES = 256 * _COLUMNS * 8


class ManifestError(ValueError):
    """The payload must not be loaded; the message names the tensor or the field."""


class Entry(NamedTuple):
    """One tensor of a payload; the first three fields are those of its `TensorSpec`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str  # beside the manifest
    offset: int  # of the first byte; bytes are little-endian, in C order, without gaps
    checksum: str  # of these bytes, see `combine_sums`


class Manifest(NamedTuple):
    """Contents of a payload, as tensors, with the learner's policy version, 0 or more."""

    version: int
    entries: tuple[Entry, ...]


def tensor_bytes(tensor: TensorSpec | Entry) -> int:
    """Returns the size of a tensor in bytes."""
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def chunk_sums(chunk: np.ndarray) -> bytes:
    """Returns the partial sums of one chunk, u8[N] with N at most CHUNK_BYTES."""
    if chunk.nbytes <= 8 * _COLUMNS:
        return chunk.tobytes()
    words = chunk[: chunk.nbytes // 8 * 8].view(np.uint64)
    whole = words.size // _COLUMNS * _COLUMNS
    sums = words[:whole].reshape(-1, _COLUMNS).sum(axis=0, dtype=np.uint64)
    rest = words[whole:]
    sums[: rest.size] += rest
    return sums.tobytes() + chunk[words.nbytes :].tobytes()


def combine_sums(sums: Sequence[bytes], *, nbytes: int) -> str:
    """Returns the 128-bit checksum, in hexadecimal, of data whose `chunks` have these sums."""
    digest = hashlib.blake2b(nbytes.to_bytes(8, "little"), digest_size=16)
    for part in sums:
        digest.update(part)
    return digest.hexdigest()


def chunks(data: np.ndarray) -> list[np.ndarray]:
    """Splits u8[N] into consecutive views of CHUNK_BYTES."""
    return [data[i : i + CHUNK_BYTES] for i in range(0, data.nbytes, CHUNK_BYTES)]


def dump(manifest: Manifest) -> str:
    """Returns the text of a manifest file."""
    entries = [entry._asdict() for entry in manifest.entries]
    return json.dumps({"format": FORMAT, "version": manifest.version, "tensors": entries})


def parse(text: str) -> Manifest:
    """Reads the text of a manifest file; raises ManifestError if `dump` could not have written the
    text, a dtype is unknown, a file name leaves the directory, or a tensor occurs twice."""
    try:
        raw = json.loads(text)
    except json.JSONDecodeError as error:
        raise ManifestError(f"the manifest is not JSON: {error}") from None
    if not isinstance(raw, dict) or raw.keys() != {"format", "version", "tensors"}:
        raise ManifestError("the manifest must have exactly the keys format, version and tensors")
    if raw["format"] != FORMAT:
        raise ManifestError(f"manifest format {raw['format']!r} is unknown; expected {FORMAT}")
    if not _count(raw["version"]) or not isinstance(raw["tensors"], list):
        raise ManifestError(
            "the manifest's version must be an integer of at least 0 and its tensors a list"
        )
    entries = tuple(_entry(item) for item in raw["tensors"])
    repeated = [name for name, n in Counter(entry.name for entry in entries).items() if n > 1]
    if repeated:
        raise ManifestError(f"{repeated[0]}: occurs twice in the manifest")
    return Manifest(raw["version"], entries)


def read(directory: Path) -> Manifest:
    """Reads the manifest of a payload; raises ManifestError if it is missing or invalid."""
    try:
        return parse((directory / FILE).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{directory / FILE} cannot be read: {error}") from None


def check_tensors(entries: Sequence[Entry], expected: Sequence[TensorSpec]) -> None:
    """Checks that a manifest has exactly the tensors that a model needs; raises ManifestError if a
    tensor is missing, unexpected, or of another shape or dtype."""
    needed, held = {spec.name: spec for spec in expected}, {entry.name for entry in entries}
    for name in needed:
        if name not in held:
            raise ManifestError(f"{name}: missing; the model needs it")
    for entry in entries:
        if entry.name not in needed:
            raise ManifestError(f"{entry.name}: unexpected; the model has no such tensor")
        spec = needed[entry.name]
        if entry.shape != spec.shape:
            raise ManifestError(f"{entry.name}: shape {entry.shape}; the model needs {spec.shape}")
        if entry.dtype != spec.dtype:
            raise ManifestError(f"{entry.name}: dtype {entry.dtype}; expected {spec.dtype}")


def _entry(item: Any) -> Entry:
    if not isinstance(item, dict) or item.keys() != set(Entry._fields):
        raise ManifestError(f"a tensor of the manifest must have the keys {Entry._fields}: {item}")
    name = item["name"]
    if not isinstance(name, str) or not name:
        raise ManifestError(f"a tensor of the manifest has the name {name!r}")
    if not isinstance(item["shape"], list) or not all(_count(n) for n in item["shape"]):
        raise ManifestError(f"{name}: the shape {item['shape']!r} is not a list of sizes")
    if item["dtype"] not in ITEM_BYTES:
        raise ManifestError(f"{name}: dtype {item['dtype']!r}; known are {', '.join(ITEM_BYTES)}")
    if not isinstance(item["file"], str) or not _FILE_NAME.fullmatch(item["file"]):
        raise ManifestError(
            f"{name}: {item['file']!r} is not the name of a file beside the manifest"
        )
    if not _count(item["offset"]) or not isinstance(item["checksum"], str):
        raise ManifestError(
            f"{name}: the offset must be an integer of at least 0 and the checksum a string"
        )
    return Entry(**{**item, "shape": tuple(item["shape"])})


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0
