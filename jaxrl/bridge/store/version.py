"""Manifest of a version in a store: the learner, the version, and the digest of every chunk.

A version is a set of files. A file is cut into chunks of `CHUNK_BYTES`, each named by the digest of
its bytes. A store has a chunk whole, or its difference to an older chunk, or both.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxrl.bridge import manifest
from jaxrl.bridge.base import LearnerIdentity
from jaxrl.bridge.manifest import ManifestError
from jaxrl.bridge.store.chunks import CHUNK_BYTES, Digest

FORMAT = 1

_KEYS = {"format", "version", "learner", "word", "files"}
_DIGEST = re.compile(r"[0-9a-f]{32}")
_WORDS = (2, 4)  # bytes


class StoredChunk(NamedTuple):
    """A chunk of a file."""

    digest: str  # of its bytes, in hexadecimal
    base: str  # digest of the chunk it is stored as a difference to; "" without a difference
    whole: bool  # the store has the chunk itself

    def delta_name(self) -> str:
        """Returns the name of the object with the difference."""
        return f"deltas/{self.base}-{self.digest}"

    def whole_name(self) -> str:
        """Returns the name of the object with the bytes."""
        return f"chunks/{self.digest}"

    def objects(self) -> Iterator[str]:
        """Yields the names of its objects."""
        if self.base:
            yield self.delta_name()
        if self.whole:
            yield self.whole_name()


class StoredFile(NamedTuple):
    """A file of a version."""

    name: str
    nbytes: int
    chunks: tuple[StoredChunk, ...]


class StoredVersion(NamedTuple):
    """Contents of a manifest."""

    version: int
    learner: LearnerIdentity
    word: int  # bytes of a number, the unit of differences
    files: tuple[StoredFile, ...]

    def objects(self) -> set[str]:
        """Returns the names of the objects of all chunks."""
        return {name for file in self.files for c in file.chunks for name in c.objects()}


def dump(version: StoredVersion) -> bytes:
    """Returns the bytes of a manifest."""
    files = [file._asdict() for file in version.files]
    content = {**version._asdict(), "format": FORMAT, "learner": version.learner._asdict()}
    return json.dumps({**content, "files": files}, separators=(",", ":")).encode()


def name(data: bytes, *, version: int, digest: Digest) -> str:
    """Returns the name of a manifest in the store, which contains the digest of its bytes."""
    return f"versions/{version}-{digest(data)}"


def digest_in(name: str) -> str:
    """Returns the digest in the name of a manifest."""
    return name.rpartition("-")[2]


def parse_version(data: bytes) -> StoredVersion:
    """Reads the bytes of a manifest; raises ManifestError if `dump` could not have written them."""
    try:
        raw = json.loads(data)
        if raw.keys() != _KEYS or raw["format"] != FORMAT:
            raise ManifestError(
                f"the format is not {FORMAT}; learner and servers need the same version of jaxrl"
            )
        files = tuple(map(_file, raw["files"]))
        found = StoredVersion(
            raw["version"], manifest.parse_learner(raw["learner"]), raw["word"], files
        )
        if not manifest.is_count(found.version) or found.word not in _WORDS:
            raise ManifestError("its version or its word size is invalid")
        if len({file.name for file in files}) != len(files):
            raise ManifestError("a file occurs twice")
        return found
    except ManifestError as error:
        raise ManifestError(f"the manifest in the store: {error}") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ManifestError(f"the manifest in the store is invalid: {error!r}"[:500]) from None


def _file(raw: Any) -> StoredFile:
    file = StoredFile(**raw)._replace(chunks=tuple(StoredChunk(*chunk) for chunk in raw["chunks"]))
    if not manifest.is_file_name(file.name) or not manifest.is_count(file.nbytes):
        raise ManifestError(f"{str(file.name)[:200]!r} is not the name and size of a file")
    if len(file.chunks) != -(-file.nbytes // CHUNK_BYTES):
        raise ManifestError(f"{file.name}: {len(file.chunks)} chunks for {file.nbytes} bytes")
    for chunk in file.chunks:
        digests = [chunk.digest, chunk.base] if chunk.base != "" else [chunk.digest]
        if not all(map(_DIGEST.fullmatch, digests)) or type(chunk.whole) is not bool:
            raise ManifestError(f"{file.name}: invalid chunk {str(chunk)[:200]}")
        if not (chunk.base or chunk.whole):
            raise ManifestError(f"{file.name}: chunk {chunk.digest} has no object")
    return file
