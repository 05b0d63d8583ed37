"""The share of a version that each process of the learner writes.

The tensors of a model are divided among the processes. Each holds its own on the host, in a file of
its own, and writes it; process 0 writes the manifest that names all of them. No host holds the
whole model, and no link carries it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.bridge import payload
from jaxrl.bridge.base import WeightSource
from jaxrl.bridge.manifest import Entry
from jaxrl.bridge.safetensors_file import SafetensorsFile, plan_file
from jaxrl.bridge.store.objects import Objects
from jaxrl.bridge.store.upload import FileWriter
from jaxrl.bridge.store.version import StoredFile
from jaxrl.core.hosts import Hosts


class Share(NamedTuple):
    """The part of a version that one process has written."""

    entries: tuple[Entry, ...]
    files: tuple[StoredFile, ...]


class ShareWriter:
    """Writes the share of this process, of successive versions.

    The last version stays in this process's memory, and the next is written beside it: what changed
    in between is what travels.
    """

    def __init__(self, objects: Objects, *, hosts: Hosts, word: int) -> None:
        """Takes the place in the store of all processes; `word` is the bytes of a number."""
        self._writer = FileWriter(objects)
        self._hosts = hosts
        self._word = word
        self._file: SafetensorsFile | None = None
        self._buffers = list[np.ndarray]()
        self._complete = hosts.on_all(self._writer.complete)
        self._shares: Sequence[Share] = ()

    def write(self, source: WeightSource) -> Sequence[Share]:
        """Writes this process's tensors and returns the shares of all processes. All must call it.

        Raises:
          StoreError: the last version stays the base.
        """
        name = "model"
        if self._hosts.count > 1:
            name = f"model-{self._hosts.index + 1:05}-of-{self._hosts.count:05}"
        file = plan_file(source.specs(), name=f"{name}.safetensors")
        if file != self._file:
            self._buffers = [np.zeros(file.nbytes, np.uint8) for _ in range(2)]
            self._file = file
        buffer = self._buffers[0]
        payload.write_tensors(source, file, buffer)
        stored = self._writer.write({file.name: buffer}, word=self._word)
        self._buffers.reverse()  # the base of the next version stays as it is
        self._shares = self._hosts.gather(Share(file.entries, stored))
        return self._shares

    def complete(self) -> Sequence[StoredFile]:
        """Has all processes write their shares whole; for process 0, in `Hosts.on_leader`."""
        own = self._complete()
        others = (file for share in self._shares[1:] for file in share.files)
        return (*own, *map(_whole, others))

    def close(self) -> None:
        """Frees the memory."""
        self._buffers.clear()


def _whole(file: StoredFile) -> StoredFile:
    return file._replace(chunks=tuple(chunk._replace(whole=True) for chunk in file.chunks))
