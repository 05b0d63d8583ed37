"""Publishing of LoRA adapters alone, through vLLM's own interface.

Every version is a directory in PEFT's format and an adapter with a new name, because vLLM keys its
prefix cache by name and path. Requests in flight finish with the adapter they started with. The
frozen base weights reach each server once, through a `WeightPublisher`; a server without jaxrl's
engine has them from its start, and they are checked.
"""

import contextlib
import hashlib
import itertools
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import NamedTuple

from jaxrl.bridge.base import (
    LearnerIdentity,
    PoisonedError,
    RefusedError,
    Timings,
    UnavailableError,
    new_learner,
)
from jaxrl.bridge.servers.control import VllmServer
from jaxrl.bridge.swap import swap_weights
from jaxrl.core.precision import DType
from jaxrl.huggingface import peft
from jaxrl.models.lora import Adapted
from jaxrl.models.spec import Params

PublishBase = Callable[[Sequence[VllmServer], Params, int], None]
"""Publishes the base weights to some servers as a version, or checks theirs; raises as
`WeightPublisher.publish`."""
_PREFIX = "jaxrl-"
_FAILURES = RefusedError, PoisonedError, UnavailableError


Place = Callable[[VllmServer], PurePath]
"""server -> directory of a version on that server's host; raises as `bring`."""


class Delivery(NamedTuple):
    """A way to the servers for the directory of each version."""

    root: Path  # existing; each version gets a directory below it
    # (directory, version) -> place, which may also be called for one of the versions before
    send: Callable[[Path, int], Place]


def in_place(root: Path) -> Delivery:
    """Returns the delivery to servers that see `root` under the same path."""
    return Delivery(root.resolve(), lambda directory, _: lambda _: directory)


class AdapterPublisher(contextlib.AbstractContextManager["AdapterPublisher"]):
    """Publishes adapters to every server that answers; servers unload them at the end of its block.
    Those of a killed process are unloaded by the next process of its run."""

    def __init__(
        self,
        servers: Sequence[VllmServer],
        delivery: Delivery,
        *,
        specs: Adapted,
        base: str,
        wire: DType,
        publish_base: PublishBase,
        learner: LearnerIdentity | None = None,
        keep: int = 2,
    ) -> None:
        """Makes the publisher without connecting.

        Args:
          servers: receive the adapters.
          delivery: brings each version to the servers' hosts.
          specs: specs of the adapters and the base weights.
          base: path of the base model, recorded in the adapter's files.
          wire: dtype in which adapters and weights are sent.
          publish_base: called with the servers that lack the base weights, such as restarted ones.
          learner: identity of the learner; by default a new one.
          keep: number of versions to keep, because requests may still name them.
        """
        self._servers, (self._root, self._send) = servers, delivery
        self._specs, self._base, self._wire = specs, base, wire
        self._publish_base, self._keep = publish_base, keep
        learner = learner or new_learner()
        run = hashlib.blake2b(learner.name.encode(), digest_size=4).hexdigest()
        self._run = f"{_PREFIX}{run}-"  # a server may hold adapters of its earlier processes
        self._own = f"{self._run}{learner.session}-"
        self._labels: dict[str, str] = {}
        # Names of the last versions -> the way to them.
        self._kept: dict[str, Callable[[VllmServer], PurePath]] = {}

    def use(self, servers: Sequence[VllmServer]) -> None:
        """Publishes to these servers from now on; new ones get the base weights first."""
        self._servers = servers

    def __exit__(self, *_: object) -> None:
        for name in list(self._kept):
            self._remove(name)

    def publish(self, params: Adapted, *, version: int) -> tuple[str, Timings]:
        """Returns once every server that answers has loaded the adapter of `version`.

        Returns:
          The adapter's name, which requests give as their model, and the timings.

        Raises:
          RefusedError: every server refused and continues with the adapters it has.
          UnavailableError: no server answers.
          PoisonedError: as `publish_base`.
        """
        start = time.perf_counter()
        name = f"{self._own}{version}"
        draft, directory = self._root / f".{name}", self._root / name
        peft.save_adapter(
            draft, params.adapters, specs=self._specs, base=self._base, dtype=self._wire
        )
        draft.rename(directory)
        place = self._send(directory, version)
        written = time.perf_counter() - start

        def load(server: VllmServer) -> Timings:
            start = time.perf_counter()
            found = place(server)
            fetched = time.perf_counter()
            server.load_adapter(name, found)
            return Timings(fetch=fetched - start, load=time.perf_counter() - fetched)

        try:
            timings = swap_weights(self._with_base(params, version, place), load)
        except _FAILURES:
            self._remove(name)
            raise
        self._kept[name] = place
        while len(self._kept) > self._keep:
            self._remove(next(iter(self._kept)))
        return name, timings._replace(write=written)

    def _with_base(self, params: Adapted, version: int, place: Place) -> list[VllmServer]:
        """Publishes the base weights where they are missing; returns the servers that hold them."""
        ready: list[VllmServer] = []
        without: list[VllmServer] = []
        failures: list[Exception] = []
        for server in self._servers:
            label = self._labels.get(server.url)
            try:
                (ready if label is not None and server.serves(label) else without).append(server)
            except UnavailableError as error:
                failures.append(error)
        if ready:  # the base is not written for hosts that cannot fetch so much as an adapter
            with ThreadPoolExecutor(max(1, len(without))) as pool:
                reached = pool.map(lambda server: _reaches(server, place), without)
                without = list(itertools.compress(without, reached))
        if without:
            try:
                self._publish_base(without, params.frozen, version)
            except _FAILURES as error:
                failures.append(error)
            else:
                ready += [server for server in without if self._took_base(server, version)]
        if not ready:
            raise failures[0] if failures else UnavailableError("no server has the base weights")
        return ready

    def _took_base(self, server: VllmServer, version: int) -> bool:
        """Tells whether a server has taken the base weights; unloads what killed processes left
        there, and loads the versions that requests may still name."""
        with contextlib.suppress(*_FAILURES):
            if not server.serves(str(version)):
                return False
            self._labels[server.url] = str(version)
            held = server.adapter_names(self._run if server.shared else _PREFIX)
            for name in held:
                if not name.startswith(self._own):
                    server.unload_adapter(name)
            for name, place in self._kept.items():
                if name not in held:
                    with contextlib.suppress(*_FAILURES):  # its host may have lost an old version
                        server.load_adapter(name, place(server))
            return server.serves(str(version))
        return False

    def _remove(self, name: str) -> None:
        self._kept.pop(name, None)
        for server in self._servers:
            server.unload_adapter(name)
        shutil.rmtree(self._root / name, ignore_errors=True)


def _reaches(server: VllmServer, place: Place) -> bool:
    try:
        place(server)
    except (RefusedError, UnavailableError) as error:
        server.fail(error)
        return False
    return True
