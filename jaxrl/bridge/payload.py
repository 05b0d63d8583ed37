"""Writes the tensors of a source to a payload's file, and maps files into memory."""

import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrl.bridge import manifest
from jaxrl.bridge.base import TensorSpec, WeightSource
from jaxrl.bridge.manifest import Manifest, ManifestEntry, ManifestError
from jaxrl.bridge.safetensors_file import SafetensorsFile

_THREADS = 2  # they saturate the memory's bandwidth; copying releases the GIL
_POOL = ThreadPoolExecutor(_THREADS)  # kept: small models copy faster than threads start
_BATCH_BYTES = 32 << 20  # divided among the threads; two batches wait while a third is made

Piece = tuple[int, np.ndarray]
"""Bytes of a payload's file: offset and u8[N]."""


def write_tensors(source: WeightSource, file: SafetensorsFile, out: np.ndarray) -> None:
    """Writes the bytes of a file to u8[N] `out`; raises ValueError if the source yields a tensor
    that differs from its spec."""

    def write(part: Sequence[Piece]) -> None:
        for offset, data in part:
            out[offset : offset + data.nbytes] = data

    write([(0, np.frombuffer(file.header, np.uint8))])
    running = deque[Future[None]]()
    try:
        for batch in _batches(source, file):
            while len(running) > _THREADS:
                running.popleft().result()
            running += [_POOL.submit(write, part) for part in _divide(batch)]
    finally:
        wait(running)  # after an error, too, no thread writes to the file
    for future in running:
        future.result()


def _batches(source: WeightSource, file: SafetensorsFile) -> Iterator[list[Piece]]:
    """Yields batches of whole tensors, all but the last of at least `_BATCH_BYTES`; raises
    ValueError if a tensor differs from its spec."""
    batch, nbytes = list[Piece](), 0
    for entry, (name, array) in zip(file.entries, source, strict=True):
        spec = TensorSpec(*entry[:3])
        if (name, array.shape, array.dtype.name) != spec:
            raise ValueError(
                f"the source announced {spec} and yielded {name} {array.dtype} {array.shape}"
            )
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        batch.append((entry.offset, data))
        nbytes += data.nbytes
        if nbytes >= _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    yield batch


def _divide(batch: Sequence[Piece]) -> list[list[Piece]]:
    """Cuts a batch into parts of equal size, one for each thread."""
    share = -(-sum(data.nbytes for _, data in batch) // _THREADS)
    parts: list[list[Piece]] = [[] for _ in range(_THREADS)]
    at = 0  # bytes of the batch that have a part
    for offset, data in batch:
        begin = 0
        while begin < data.nbytes:
            thread, used = divmod(at, share)
            end = min(data.nbytes, begin + share - used)
            parts[thread].append((offset + begin, data[begin:end]))
            at += end - begin
            begin = end
    return parts


def write_manifest(directory: Path, content: Manifest) -> None:
    """Completes a payload: its manifest appears whole or not at all."""
    draft = directory / f".{manifest.FILE}"
    draft.write_text(manifest.dump(content))
    draft.replace(directory / manifest.FILE)


class MappedTensor(NamedTuple):
    """A tensor of a payload, mapped into memory."""

    entry: ManifestEntry
    data: np.ndarray  # u8[N], not copied


def resolve(root: Path, payload: str) -> Path:
    """Returns the directory of a payload, links followed; raises ManifestError if it is not an
    existing directory below the root."""
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


def open_tensors(directory: Path, entries: Sequence[ManifestEntry]) -> list[MappedTensor]:
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


def map_writable(path: Path, nbytes: int) -> np.ndarray:
    """Maps a file of u8[N]; creates it if it is missing, and else reuses its memory, because new
    pages cost more than a copy. Raises OSError if there is too little memory."""
    if not nbytes:
        path.write_bytes(b"")
        return np.zeros(0, np.uint8)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.truncate(descriptor, min(os.fstat(descriptor).st_size, nbytes))
        os.posix_fallocate(descriptor, 0, nbytes)  # fails here if memory is full
        return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
    finally:
        os.close(descriptor)


def _map(path: Path) -> np.ndarray:
    try:
        with open(path, "rb", opener=manifest.open_regular) as file:
            # Copied on write, so that consumers that need writable memory get it.
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path} cannot be mapped: {error}") from None
    return np.frombuffer(content, np.uint8)
