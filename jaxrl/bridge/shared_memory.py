"""Publishing to servers on the same host through two reused files in shared memory."""

import shutil
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.bridge import manifest, payload
from jaxrl.bridge.base import WeightSource
from jaxrl.bridge.manifest import Manifest
from jaxrl.bridge.owned_directory import MEMORY, OwnedDirectory
from jaxrl.bridge.safetensors_file import SafetensorsFile, plan_file
from jaxrl.bridge.servers.control import VllmServer
from jaxrl.bridge.swap import WeightPublisher


class SharedMemoryPublisher(WeightPublisher):
    """Publishes to servers on the same host.

    Two slots, each a safetensors file with its manifest, are written in turn, so that no slot is
    written while a server may read it. They occupy twice the weights' size in the wire dtype until
    `close`. Slots that a killed learner of the same user left behind are removed.
    """

    def __init__(
        self, servers: Sequence[VllmServer], *, memory: Path = MEMORY, **connection: Any
    ) -> None:
        """Connects the servers as `WeightPublisher` does, with its keyword arguments."""
        self._owned = OwnedDirectory(memory)
        self._root = (self._owned.path / "slots").resolve()
        self._root.mkdir()
        self._file: SafetensorsFile | None = None
        # Directory and bytes of each file, which stays mapped: new pages cost more than copying.
        self._slots = deque[tuple[Path, np.ndarray]]()
        try:
            super().__init__(servers, str(self._root), **connection)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Frees the memory; servers keep the weights they have loaded."""
        self._slots.clear()
        self._owned.close()

    def _write(self, source: WeightSource, *, version: int) -> str:
        file = plan_file(source.specs())
        if file != self._file:
            self._slots.clear()
            for directory in self._root.iterdir():
                shutil.rmtree(directory)
            for name in ("slot-0", "slot-1"):
                directory = self._root / name
                directory.mkdir(mode=0o700)
                content = payload.map_writable(directory / file.name, file.nbytes)
                self._slots.append((directory, content))
            self._file = file
        self._slots.rotate()
        directory, content = self._slots[0]
        (directory / manifest.FILE).unlink(missing_ok=True)
        payload.write_tensors(source, file, content)
        payload.write_manifest(directory, Manifest(version, self._learner, file.entries))
        (directory / manifest.FILE).chmod(0o600)
        return directory.name
