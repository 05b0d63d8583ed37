"""Writes the tensors of a source to the file of a payload, and maps them."""

import mmap
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl.bridge import checksum, manifest
from jaxrl.bridge.base import Learner, TensorSpec, WeightSource
from jaxrl.bridge.manifest import Entry, Manifest, ManifestError
from jaxrl.bridge.safetensors_file import SafetensorsFile

# Copying releases the GIL; two threads saturate the memory's bandwidth.
_THREADS = 2
_SMALL = 64 << 10  # bytes that are written sooner than a thread takes the task
_UNFINISHED = 32 << 20  # bytes of tensors that wait for the threads while the source yields others


WriteBytes = Callable[[int, np.ndarray], None]
"""Writes u8[N] to the file of the payload at an offset; called from several threads."""


def write_tensors(
    source: WeightSource,
    file: SafetensorsFile,
    write_bytes: WriteBytes,
    *,
    version: int,
    learner: Learner,
) -> Manifest:
    """Writes every tensor and returns the manifest; raises ValueError if the source yields a tensor
    that differs from its spec."""
    entries = list[Entry]()
    waiting = deque[tuple[TensorSpec, int, int, list[Future[None]]]]()

    def finish() -> int:
        """Waits for the oldest tensor; returns its size."""
        spec, offset, nbytes, futures = waiting.popleft()
        for future in futures:
            future.result()
        entries.append(Entry(*spec, file.name, offset))
        return nbytes

    write_bytes(0, np.frombuffer(file.header, np.uint8))
    unfinished = 0
    with ThreadPoolExecutor(_THREADS) as pool:
        for (spec, offset), (name, array) in zip(file.tensors, source, strict=True):
            if (name, array.shape, array.dtype.name) != spec:
                raise ValueError(
                    f"the source announced {spec} and yielded {name} {array.dtype} {array.shape}"
                )
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            run = _at_once if data.nbytes <= _SMALL else pool.submit
            starts = range(offset, offset + data.nbytes, checksum.CHUNK_BYTES)
            parts = zip(starts, checksum.chunks(data), strict=True)
            futures = [run(write_bytes, *part) for part in parts]
            waiting.append((spec, offset, data.nbytes, futures))
            unfinished += data.nbytes
            while unfinished > _UNFINISHED:
                unfinished -= finish()
        while waiting:
            finish()
    return Manifest(version, learner, tuple(entries))


def _at_once(function: Callable[..., None], *arguments: Any) -> Future[None]:
    """Calls a function in this thread."""
    done = Future[None]()
    done.set_result(function(*arguments))
    return done


def write_manifest(directory: Path, content: Manifest) -> None:
    """Completes a payload: its manifest appears whole or not at all."""
    draft = directory / f".{manifest.FILE}"
    draft.write_text(manifest.dump(content))
    draft.replace(directory / manifest.FILE)


class MappedTensor(NamedTuple):
    """A tensor of a payload, mapped into memory."""

    entry: Entry
    data: np.ndarray  # u8[N], not copied


def resolve(root: Path, payload: str) -> Path:
    """Returns the directory of a payload; raises ManifestError if it is not an existing directory
    below the root after following links."""
    shown = repr(payload)[:200]
    try:
        directory = (root / payload).resolve()
        inside = directory != root and directory.is_relative_to(root)
        found = inside and directory.is_dir()
    except (OSError, RuntimeError, TypeError, ValueError) as error:  # a loop of links, a long name
        raise ManifestError(f"{shown} is not below the root {root}: {str(error)[:200]}") from None
    if not inside:
        raise ManifestError(f"{shown} leads out of the root {root}")
    if not found:
        raise ManifestError(f"{shown} is not a directory below the root {root}")
    return directory


def open_tensors(directory: Path, entries: Sequence[Entry]) -> list[MappedTensor]:
    """Maps the files and locates every tensor without reading it; raises ManifestError if a file is
    a link, cannot be opened or is too short."""
    files = {name: _map(directory / name) for name in dict.fromkeys(e.file for e in entries)}
    mapped = []
    for entry in entries:
        size = manifest.tensor_bytes(entry)
        data = files[entry.file][entry.offset : entry.offset + size]
        if data.nbytes != size:
            raise ManifestError(
                f"{entry.name}: needs {size} bytes at {entry.offset} of {entry.file}, "
                f"which has {files[entry.file].nbytes}"
            )
        mapped.append(MappedTensor(entry, data))
    return mapped


def _map(path: Path) -> np.ndarray:
    try:
        with open(path, "rb", opener=manifest.open_regular) as file:
            # Copied on write, so that consumers that need writable memory get it.
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path} cannot be mapped: {error}") from None
    return np.frombuffer(content, np.uint8)
