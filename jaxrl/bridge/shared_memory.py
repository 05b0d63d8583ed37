"""Publishing to servers on the same host through two reused files in shared memory."""

import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxrl.bridge import manifest, payload
from jaxrl.bridge.base import InFlight, Learner, TensorSpec, WeightSource
from jaxrl.bridge.owned_directory import MEMORY, OwnedDirectory
from jaxrl.bridge.safetensors_file import SafetensorsFile, plan_file
from jaxrl.bridge.servers.control import VllmServer
from jaxrl.bridge.swap import WeightPublisher


class _Slot:
    """A payload whose file stays mapped: allocating new pages costs more than copying."""

    def __init__(self, directory: Path, file: SafetensorsFile) -> None:
        directory.mkdir(mode=0o700)
        self.directory = directory
        self._file = file
        with open(directory / file.name, "x+b", opener=_private) as stream:
            os.posix_fallocate(stream.fileno(), 0, file.nbytes)  # fails here if memory is full
            self._map = mmap.mmap(stream.fileno(), file.nbytes)
        self._bytes = np.frombuffer(self._map, np.uint8)

    def fill(self, source: WeightSource, *, version: int, learner: Learner) -> None:
        (self.directory / manifest.FILE).unlink(missing_ok=True)
        written = payload.write_tensors(
            source, self._file, self._put, version=version, learner=learner
        )
        payload.write_manifest(self.directory, written)
        (self.directory / manifest.FILE).chmod(0o600)

    def _put(self, offset: int, data: np.ndarray) -> None:
        self._bytes[offset : offset + data.nbytes] = data


class SharedMemoryPublisher(WeightPublisher):
    """Publishes to servers on the same host.

    Two slots, each a safetensors file with its manifest, are written in turn, so that none is
    written while a server may read it. They occupy twice the weights' size in the wire dtype until
    `close`. Slots that a killed learner of the same user left behind are removed.
    """

    def __init__(
        self,
        servers: Sequence[VllmServer],
        *,
        wire: np.dtype,
        sampler: np.dtype,
        in_flight: InFlight = "keep",
        learner: Learner | None = None,
        memory: Path = MEMORY,
    ) -> None:
        """Connects the servers as `WeightPublisher` does."""
        self._owned = OwnedDirectory(memory)
        self._root = (self._owned.path / "slots").resolve()
        self._root.mkdir()
        self._specs: list[TensorSpec] = []
        self._slots: list[_Slot] = []
        try:
            super().__init__(
                servers,
                str(self._root),
                wire=wire,
                sampler=sampler,
                in_flight=in_flight,
                learner=learner,
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Frees the memory; servers keep the weights they have loaded."""
        self._slots.clear()
        self._owned.close()

    def _write(self, source: WeightSource, *, version: int) -> str:
        specs = list(source.specs())
        if specs != self._specs:
            self._slots.clear()
            for directory in self._root.iterdir():
                shutil.rmtree(directory)
            file = plan_file(specs)
            self._slots = [_Slot(self._root / f"slot-{i}", file) for i in range(2)]
            self._specs = specs
        slot = self._slots.pop(0)
        self._slots.append(slot)
        slot.fill(source, version=version, learner=self._learner)
        return slot.directory.name


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
