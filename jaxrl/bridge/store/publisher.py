"""Publishing to servers anywhere through a store; the agent on each server's host fetches it."""

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from jaxrl.bridge import manifest, payload
from jaxrl.bridge.base import (
    InFlight,
    Learner,
    TensorSpec,
    UnavailableError,
    WeightSource,
    new_learner,
)
from jaxrl.bridge.safetensors_file import plan_file
from jaxrl.bridge.servers.control import VllmServer
from jaxrl.bridge.store.upload import Upload
from jaxrl.bridge.swap import WeightPublisher


def bring(server: VllmServer, upload: Upload, request: dict[str, Any]) -> PurePath:
    """Returns the directory that an uploaded version has on a server's host, once it is there and
    every chunk is verified.

    Raises:
      RefusedError: the server belongs to another learner, or its host has no agent.
      UnavailableError: the server, its agent or the store does not answer.
    """
    found = server.fetch(request) or server.fetch(upload.complete())
    if found is None:
        raise UnavailableError(f"{server.url}: its agent misses chunks of a whole version")
    return found


class StorePublisher(WeightPublisher):
    """Publishes through an object store, a web server or a shared directory.

    The last version stays in this process's memory, and the next is written beside it: what changed
    in between is what travels.
    """

    def __init__(
        self,
        servers: Sequence[VllmServer],
        url: str,
        *,
        key: str | None,
        wire: np.dtype,
        sampler: np.dtype,
        in_flight: InFlight = "keep",
        learner: Learner | None = None,
    ) -> None:
        """Connects the servers as `WeightPublisher` does.

        Raises:
          ValueError: if `url` is not the address of a store.
          StoreError: if the packages for it are not installed.
        """
        learner = learner or new_learner()
        self._upload = Upload(url, key=key, learner=learner, group="weights")
        self._word, self._specs = wire.itemsize, list[TensorSpec]()
        self._buffers: list[np.ndarray] = []
        super().__init__(
            servers, "", wire=wire, sampler=sampler, in_flight=in_flight, learner=learner
        )
        self._upload.remove_earlier()

    def close(self) -> None:
        """Empties the store; servers keep the weights they have loaded."""
        self._upload.close()
        self._buffers.clear()

    def _write(self, source: WeightSource, *, version: int) -> dict[str, Any]:
        specs = list(source.specs())
        file = plan_file(specs)
        if specs != self._specs:
            self._buffers = [np.zeros(file.nbytes, np.uint8) for _ in range(2)]
            self._specs = specs
        buffer = self._buffers[0]

        def put(offset: int, data: np.ndarray) -> None:
            buffer[offset : offset + data.nbytes] = data

        written = payload.write_tensors(source, file, put, version=version, learner=self._learner)
        text = np.frombuffer(manifest.dump(written).encode(), np.uint8)
        files = {file.name: buffer, manifest.FILE: text}
        request = self._upload.write(files, number=version, word=self._word)
        self._buffers.reverse()  # the base of the next version stays as it is
        return request

    def _bring(self, server: VllmServer, payload: dict[str, Any]) -> str:
        directory = bring(server, self._upload, payload)
        return str(directory.relative_to(directory.parent.parent))
