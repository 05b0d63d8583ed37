"""The share of a version that each process of the learner writes.

The tensors of a model are divided among the processes. Each process holds its tensors on its host
and writes them as a file; process 0 writes the manifest that names all files. So no host holds the
whole model, and no link carries it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.bridge import payload
from jaxrl.bridge.base import WeightSource
from jaxrl.bridge.manifest import ManifestEntry
from jaxrl.bridge.safetensors_file import SafetensorsFile, plan_file
from jaxrl.bridge.store.objects import Objects
from jaxrl.bridge.store.upload import FileWriter
from jaxrl.bridge.store.version import StoredFile
from jaxrl.core.hosts import Hosts


class Share(NamedTuple):
    """The part of a version that one process has written."""

    entries: tuple[ManifestEntry, ...]
    files: tuple[StoredFile, ...]


class ShareWriter:
    """Writes the share of this process for successive versions.

    The last version stays in this process's memory beside the next one; only changes are sent.
    """

    def __init__(self, objects: Objects, *, hosts: Hosts, word: int) -> None:
        """Writes to `objects`, the place of all processes; a number has `word` bytes."""
        self._writer = FileWriter(objects)
        self._hosts = hosts
        self._word = word
        self._file: SafetensorsFile | None = None
        self._buffers = list[np.ndarray]()
        self._complete = hosts.on_all(self._writer.complete)
        self._shares: Sequence[Share] = ()

    def write(self, source: WeightSource) -> Sequence[Share]:
        """Writes this process's tensors and returns the shares of all processes, which must all
        call it. Raises StoreError; the last version then stays the base."""
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

    def complete(self, *, again: bool) -> Sequence[StoredFile]:
        """Makes all processes write their shares whole, as `FileWriter.complete`.

        Process 0 calls it in `Hosts.on_leader`.
        """
        own = self._complete(again=again)
        others = (file for share in self._shares[1:] for file in share.files)
        return (*own, *map(_whole, others))

    def close(self) -> None:
        """Frees the memory."""
        self._buffers.clear()


def _whole(file: StoredFile) -> StoredFile:
    return file._replace(chunks=tuple(chunk._replace(whole=True) for chunk in file.chunks))
