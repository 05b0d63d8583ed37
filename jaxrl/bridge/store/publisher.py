"""Publishing to servers anywhere through a store; the agent on each server's host fetches it."""

from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from jaxrl.bridge import manifest
from jaxrl.bridge.base import LearnerIdentity, Timings, UnavailableError, WeightSource, new_learner
from jaxrl.bridge.manifest import Manifest
from jaxrl.bridge.servers.control import VllmServer
from jaxrl.bridge.store.objects import Objects, Store
from jaxrl.bridge.store.shares import ShareWriter
from jaxrl.bridge.store.upload import Upload, make_place
from jaxrl.bridge.swap import WeightPublisher, swap_weights
from jaxrl.core.hosts import Hosts

_GROUP = "weights"


def bring(server: VllmServer, upload: Upload, request: dict[str, Any]) -> PurePath:
    """Has a server's host fetch an uploaded version; returns its directory there, once every chunk
    is verified.

    Raises:
      RefusedError: the server belongs to another learner, or its host has no agent.
      BehindError: the store does not answer the host.
      UnavailableError: the server or its agent does not answer, or the store lacks the version.
    """
    found = server.fetch(request) or server.fetch(upload.complete())
    found = found or server.fetch(upload.complete(again=True))
    if found is None:
        raise UnavailableError(
            f"{server.url}: its host cannot read a version that was written twice: the store does "
            "not keep what is written"
        )
    return found


class StorePublisher(WeightPublisher):
    """Publishes through an object store, a web server or a shared directory.

    In a learner with several processes it runs in process 0; the others use `StoreFollower`.
    """

    def __init__(
        self,
        servers: Sequence[VllmServer],
        store: Store,
        *,
        wire: np.dtype,
        learner: LearnerIdentity | None = None,
        hosts: Hosts | None = None,
        **connection: Any,
    ) -> None:
        """Connects the servers as `WeightPublisher` does, with its keyword arguments; raises
        StoreError as `Objects`. `hosts` are the learner's processes, one by default."""
        learner, self._hosts = learner or new_learner(), hosts or Hosts()
        self._upload = Upload(store, learner=learner, group=_GROUP)
        self._word = wire.itemsize
        self._share = ShareWriter(self._upload.objects, hosts=self._hosts, word=self._word)
        super().__init__(servers, "", wire=wire, learner=learner, **connection)
        self._upload.remove_earlier()

    def close(self) -> None:
        """Empties the store; servers keep the weights they have loaded."""
        self._upload.close()
        self._share.close()

    def _write(self, source: WeightSource, *, version: int) -> dict[str, Any]:
        shares = self._share.write(source)
        entries = tuple(entry for share in shares for entry in share.entries)
        text = manifest.dump(Manifest(version, self._learner, entries)).encode()
        return self._upload.write(
            {manifest.FILE: np.frombuffer(text, np.uint8)},
            number=version,
            word=self._word,
            others=[file for share in shares for file in share.files],
            complete_others=self._share.complete,
        )

    def _swap(self, update: Callable[[VllmServer], Timings]) -> Timings:
        # Meanwhile the other processes write the whole chunks that a host requests.
        return self._hosts.on_leader(lambda: swap_weights(self._servers, update))

    def _bring(self, server: VllmServer, payload: dict[str, Any]) -> str:
        directory = bring(server, self._upload, payload)
        return str(directory.relative_to(directory.parent.parent))


class StoreFollower:
    """Publishes the shares of the processes after 0; raises as `StorePublisher`."""

    def __init__(
        self, store: Store, *, wire: np.dtype, learner: LearnerIdentity, hosts: Hosts
    ) -> None:
        """Makes the client; `learner` is the identity that process 0 has."""
        objects = Objects(make_place(store, learner=learner, group=_GROUP))
        self._hosts = hosts
        self._share = ShareWriter(objects, hosts=hosts, word=wire.itemsize)

    def publish(self, source: WeightSource) -> None:
        """Returns once process 0 has published the version."""
        self._share.write(source)
        self._hosts.on_leader(lambda: None)
