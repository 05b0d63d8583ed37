"""Publishing to servers on the same host through two reused files in shared memory."""

import contextlib
import mmap
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np

from jaxrl.bridge import manifest, payload
from jaxrl.bridge.base import InFlight, Server, TensorSpec, Timings, WeightSource
from jaxrl.bridge.safetensors_file import SafetensorsFile, plan_files
from jaxrl.bridge.swap import swap_weights

MEMORY = Path("/dev/shm")
_PREFIX = "jaxrl-"


class _Slot:
    """A payload whose file stays mapped: allocating new pages costs more than copying."""

    def __init__(self, directory: Path, file: SafetensorsFile) -> None:
        directory.mkdir()
        self.directory = directory
        self._files = [file]
        with (directory / file.name).open("x+b") as stream:
            os.posix_fallocate(stream.fileno(), 0, file.nbytes)  # fails here if memory is full
            self._map = mmap.mmap(stream.fileno(), file.nbytes)
        self._bytes = np.frombuffer(self._map, np.uint8)

    def fill(self, source: WeightSource, *, version: int) -> None:
        (self.directory / manifest.FILE).unlink(missing_ok=True)
        written = payload.write_tensors(source, self._files, self._put, version=version)
        payload.write_manifest(self.directory, written)

    def _put(self, file: str, offset: int, data: np.ndarray) -> None:
        self._bytes[offset : offset + data.nbytes] = data


class SharedMemoryPublisher:
    """A `WeightPublisher` for servers on the same host.

    Two slots, each a safetensors file with its manifest, are written in turn, so that none is
    written while a server may read it. They occupy twice the weights' size in the wire dtype until
    `close`. Slots that a killed process of the same user left behind are removed.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        wire: np.dtype,
        sampler: np.dtype,
        in_flight: InFlight = "keep",
        memory: Path = MEMORY,
    ) -> None:
        """Connects the servers.

        Raises:
          RefusedError: if a server computes in another dtype than `sampler`.
        """
        _remove_leftovers(memory)
        self._root = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=memory))
        self._servers = servers
        self._in_flight: InFlight = in_flight
        self._specs: list[TensorSpec] = []
        self._slots: list[_Slot] = []
        try:
            for server in servers:
                server.connect(root=str(self._root), wire=wire.name, sampler=sampler.name)
        except BaseException:
            self.close()
            raise

    def publish(self, source: WeightSource, *, version: int) -> Timings:
        """See `WeightPublisher.publish`. Servers keep sampling while the slot is written."""
        start = time.perf_counter()
        specs = list(source.specs())
        if specs != self._specs:
            self._make_slots(specs)
        slot = self._slots.pop(0)
        self._slots.append(slot)
        slot.fill(source, version=version)
        written = time.perf_counter() - start
        name, in_flight = slot.directory.name, self._in_flight
        timings = swap_weights(
            self._servers, lambda s: s.update(name, version=version, in_flight=in_flight)
        )
        return timings._replace(write=written)

    def close(self) -> None:
        """Frees the memory; servers keep the weights they have loaded."""
        self._slots.clear()
        shutil.rmtree(self._root, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_slots(self, specs: list[TensorSpec]) -> None:
        self._slots.clear()
        for directory in self._root.iterdir():
            shutil.rmtree(directory)
        (file,) = plan_files(specs)
        self._slots = [_Slot(self._root / f"slot-{i}", file) for i in range(2)]
        self._specs = specs


def _remove_leftovers(memory: Path) -> None:
    for directory in memory.glob(f"{_PREFIX}*"):
        owner = re.fullmatch(rf"{_PREFIX}(\d+)-.*", directory.name)
        # Directories of other users and of running processes stay.
        with contextlib.suppress(OSError):
            if owner and directory.stat().st_uid == os.getuid() and not _alive(int(owner[1])):
                shutil.rmtree(directory)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
