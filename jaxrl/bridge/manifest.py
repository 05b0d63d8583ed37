"""Manifest of a payload: its learner and version, and name, shape and location of every tensor.

It marks the payload as complete: a writer removes it before changing a byte and writes it last. A
directory without a manifest is never loaded. If its `generation` changes during a load, the bytes
may have changed as well.
"""

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.bridge.base import LearnerIdentity, TensorSpec, is_name

FILE = "manifest.json"
FORMAT = 3
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
_KEYS = {"format", "version", "learner", "tensors"}
_MAX_BYTES = 64 << 20  # of a manifest file; 250 bytes a tensor
_MAX_COUNT = 2**63  # every size in a file is below it
_SHOWN = 200  # characters of an invalid value in a message


class ManifestError(ValueError):
    """The payload must not be loaded; the message names the tensor or the field."""


class ManifestEntry(NamedTuple):
    """One tensor of a payload; the first three fields are its `TensorSpec`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str  # beside the manifest
    offset: int  # of the first byte; bytes are little-endian, in C order, without gaps


class Manifest(NamedTuple):
    """Tensors of a payload, with the learner and its policy version."""

    version: int  # 0 or more
    learner: LearnerIdentity
    entries: tuple[ManifestEntry, ...]


def tensor_bytes(tensor: TensorSpec | ManifestEntry) -> int:
    """Returns the size of a tensor in bytes."""
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def dump(manifest: Manifest) -> str:
    """Returns the text of a manifest file."""
    return json.dumps(
        {
            "format": FORMAT,
            "version": manifest.version,
            "learner": manifest.learner._asdict(),
            "tensors": [entry._asdict() for entry in manifest.entries],
        }
    )


def parse_manifest(text: str) -> Manifest:
    """Reads the text of a manifest file; raises ManifestError if `dump` could not have written the
    text, a dtype is unknown, a file name leaves the directory, or a tensor occurs twice."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:  # an integer may have too many digits
        raise ManifestError(f"the manifest is not JSON: {error}") from None
    if not isinstance(raw, dict) or raw.keys() != _KEYS:
        raise ManifestError(f"the manifest must have exactly the keys {', '.join(sorted(_KEYS))}")
    if raw["format"] != FORMAT:
        raise ManifestError(
            f"manifest format {_shown(raw['format'])} is unknown, expected {FORMAT}; learner and "
            "server need the same version of jaxrl"
        )
    if not is_count(raw["version"]) or not isinstance(raw["tensors"], list):
        raise ManifestError(
            "the manifest's version must be an integer of at least 0 and its tensors a list"
        )
    learner = parse_learner(raw["learner"])
    entries = tuple(_entry(item) for item in raw["tensors"])
    ((name, times),) = Counter(entry.name for entry in entries).most_common(1) or [("", 0)]
    if times > 1:
        raise ManifestError(f"{name}: occurs twice in the manifest")
    return Manifest(raw["version"], learner, entries)


def parse_learner(raw: Any) -> LearnerIdentity:
    """Reads the result of `LearnerIdentity._asdict`; raises ManifestError for anything else."""
    if (
        not isinstance(raw, dict)
        or raw.keys() != set(LearnerIdentity._fields)
        or not all(is_name(value) or (key, value) == ("replaces", "") for key, value in raw.items())
    ):
        raise ManifestError(
            f"a learner has the keys {', '.join(LearnerIdentity._fields)}, each a short text: "
            f"{_shown(raw)}"
        )
    return LearnerIdentity(**raw)


def read(directory: Path) -> Manifest:
    """Reads the manifest of a payload; raises ManifestError if it is missing, too large, invalid or
    not a regular file."""
    path = directory / FILE
    try:
        with open(path, "rb", opener=open_regular) as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ManifestError(f"{path} is larger than {_MAX_BYTES:,} bytes")
        return parse_manifest(content.decode())
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path} cannot be read: {error}") from None


def generation(directory: Path) -> tuple[int, int] | None:
    """Returns the inode and time of change, in nanoseconds, of a directory's manifest; None if
    there is no manifest. Shared memory does not reuse inodes, so each manifest has its own."""
    try:
        found = os.lstat(directory / FILE)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def open_regular(path: str, flags: int) -> int:
    """Opens a file for `open`; raises OSError for anything but a regular file, such as a link."""
    # O_NONBLOCK: opening a FIFO would wait for a writer.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError("not a regular file")


def check_tensors(entries: Sequence[ManifestEntry], expected: Sequence[TensorSpec]) -> None:
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
            raise ManifestError(
                f"{entry.name}: shape {_shown(entry.shape)}; the model needs {spec.shape}"
            )
        if entry.dtype != spec.dtype:
            raise ManifestError(f"{entry.name}: dtype {entry.dtype}; expected {spec.dtype}")


def _entry(item: Any) -> ManifestEntry:
    if not isinstance(item, dict) or item.keys() != set(ManifestEntry._fields):
        raise ManifestError(
            f"a tensor of the manifest must have the keys {', '.join(ManifestEntry._fields)}: "
            f"{_shown(item)}"
        )
    name, shape, dtype = item["name"], item["shape"], item["dtype"]
    if not is_name(name):
        raise ManifestError(f"a tensor of the manifest has the name {_shown(name)}")
    if not isinstance(shape, list) or not all(map(is_count, shape)):
        raise ManifestError(f"{name}: the shape {_shown(shape)} is not a list of sizes")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ManifestError(f"{name}: dtype {_shown(dtype)}; known are {', '.join(ITEM_BYTES)}")
    if not is_file_name(item["file"]):
        raise ManifestError(
            f"{name}: {_shown(item['file'])} is not the name of a file beside the manifest"
        )
    if not is_count(item["offset"]):
        raise ManifestError(f"{name}: the offset must be an integer of at least 0")
    return ManifestEntry(**item)._replace(shape=tuple(shape))


def is_file_name(value: Any) -> bool:
    """Tells whether a value is a file name without directories and not hidden."""
    return isinstance(value, str) and _FILE_NAME.fullmatch(value) is not None


def is_count(value: Any) -> bool:
    """Tells whether a value is an integer of at least 0 and below 2**63."""
    return type(value) is int and 0 <= value < _MAX_COUNT


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
