"""Learners, a store, and two hosts with three servers, on a simulated network and clock.

The classes are the bridge's own. Simulated are the network (HTTP, the agents' sockets, the store),
all clocks, vLLM's routes and its loading of weights, and the moments at which processes are killed.
"""

import contextlib
import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx2
import numpy as np
import obstore.store

from jaxrl.bridge import swap
from jaxrl.bridge.base import (
    UNFINISHED,
    LearnerIdentity,
    PoisonedError,
    RefusedError,
    UnavailableError,
)
from jaxrl.bridge.owned_directory import MEMORY
from jaxrl.bridge.servers import control
from jaxrl.bridge.servers.control import VllmServer
from jaxrl.bridge.store import agent, chunks, clients, slots, upload, version
from jaxrl.bridge.store.objects import Store
from jaxrl.bridge.store.publisher import StorePublisher
from tests.bridge.cases import ListSource
from tests.bridge.protocol import processes
from tests.bridge.protocol.network import Network
from tests.bridge.protocol.processes import Background, Host, Request, Server
from tests.bridge.protocol.world import Bucket, KilledError, World

F16 = np.dtype(np.float16)
STORE = "http://store/x"
SILENCE = 40.0  # seconds; longer than a lease
LONG = 600.0  # seconds; a server that did not answer is asked again sooner
FAILURES = (PoisonedError, RefusedError, UnavailableError)
_CHUNK = 256  # bytes


class Pool:
    """Stands for a pool of threads: calls one after the other, in the order of the scene."""

    order: Sequence[int] = ()

    def __init__(self, *_: Any) -> None:
        """Has no threads."""

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        """Has nothing to wait for."""

    def map(self, call: Callable[..., Any], *items: Iterable[Any]) -> Any:
        given = list(zip(*items, strict=False))
        order = [i for i in self.order if i < len(given)]
        order += [i for i in range(len(given)) if i not in order]
        found = {i: call(*given[i]) for i in order}
        return iter([found[i] for i in range(len(given))])


def _bucket(world: World, url: str, *, client_options: Any, retry_config: Any) -> Bucket:
    limit = retry_config.get("retry_timeout") or client_options["read_timeout"]
    return Bucket(world, url, patience=limit.total_seconds())


class Learner:
    """A learner's process."""

    def __init__(self, scene: "Scene", identity: LearnerIdentity) -> None:
        """Connects; raises as `StorePublisher`, after it has left the servers that admitted it."""
        self.identity = identity
        self.servers = [VllmServer(server.url, timeout=60.0) for server in scene.servers]
        self._scene = scene
        try:
            self._publisher = StorePublisher(
                self.servers, Store(STORE, None), wire=F16, sampler=F16, learner=identity
            )
        except Exception:
            self._disconnect()
            raise

    def publish(self, tensors: dict[str, np.ndarray], *, number: int) -> None:
        """Publishes a version; raises as `StorePublisher`."""
        words = {name: array.tobytes() for name, array in tensors.items()}
        self._scene.world.published[self.identity.session, number] = words
        self._publisher.publish(ListSource(tensors), version=number)

    def close(self) -> None:
        """Ends as a run does."""
        self._publisher.close()
        self._disconnect()

    def _disconnect(self) -> None:
        for server in self.servers:
            server.disconnect()


class Scene(ExitStack):
    """All processes.

    Attributes:
      learner: the learner that is alive; None without one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.pool = type("ScenePool", (Pool,), {})
        self._rng, self._sessions = np.random.default_rng(0), itertools.count(1)
        self.tensors = {"a": self._draw(300), "norm": self._draw(7)}
        self.world.published["", 0] = {n: a.tobytes() for n, a in self.tensors.items()}
        directory = Path(self.enter_context(tempfile.TemporaryDirectory(dir=MEMORY)))
        checkpoint = processes.write_checkpoint(directory / "model", self.tensors)
        self.hosts, self.servers = list[Host](), list[Server]()
        self.learner: Learner | None = None
        self._number = 0
        self.meanwhile: Callable[[], None] = self.wait
        self.world.settle = self._settle
        self.network = Network(self.world, self.servers, self._suspended)
        self.enter_context(mock.patch.dict(os.environ))
        self._replace_what_is_simulated()
        for name, ports in (("near", (8000, 8001)), ("far", (8000,))):
            host = Host(self.world, directory / name)
            self.hosts.append(host)
            self.servers += [Server(host, port=port, checkpoint=checkpoint) for port in ports]
        for server in self.servers:
            self.callback(server.stop)

    def _replace_what_is_simulated(self) -> None:
        world = self.world
        clock = SimpleNamespace(
            sleep=world.sleep, monotonic=lambda: world.now, perf_counter=lambda: world.now
        )
        open_slot = slots.open_slot

        def opened(slot: Path, files: Any) -> Any:
            processes.check_target(slot)
            return open_slot(slot, files)

        replaced: list[tuple[Any, str, Any]] = [
            (httpx2, "HTTPTransport", lambda **_: self.network),
            (obstore.store, "from_url", functools.partial(_bucket, world)),
            (processes.asyncio, "open_unix_connection", processes.connections(self.hosts)),
            (agent, "Newest", Background),
            *((module, "time", clock) for module in (agent, clients, control, swap)),
            (slots, "open_slot", opened),
            (chunks, "CHUNK_BYTES", _CHUNK),
            (version, "CHUNK_BYTES", _CHUNK),
            *((module, "ThreadPoolExecutor", self.pool) for module in (agent, swap, upload)),
            *((Path, name, method) for name, method in processes.disk(world)),
        ]
        for place, name, value in replaced:
            self.enter_context(mock.patch.object(place, name, value))

    def _draw(self, size: int) -> np.ndarray:
        return self._rng.integers(0, 1 << 16, size, np.uint16).view(F16)

    def change(self, share: float) -> None:
        """Changes a share of the learner's words."""
        for name, array in self.tensors.items():
            mask = self._rng.random(array.size) < share
            words = array.view(np.uint16) ^ (mask * self._draw(array.size).view(np.uint16))
            self.tensors[name] = words.astype(np.uint16).view(F16)

    def start(self, name: str, *, replaces: str = "") -> None:
        """Starts a learner; a failure ends it."""
        identity = LearnerIdentity(name, f"{next(self._sessions):016x}", replaces)
        self.learner = None
        with contextlib.suppress(KilledError, *FAILURES):
            self.learner = Learner(self, identity)

    def ensure_learner(self) -> None:
        """Starts a learner if none is alive. It takes the servers over from any other, because they
        may belong to two by now."""
        if self.learner is None:
            held = {server.owner() for server in self.servers} - {None}
            self.start("one", replaces="another" if "another" in held else "")
        assert self.learner is not None, "a learner cannot start"

    def publish(self) -> bool:
        """Publishes the present words; tells whether that succeeded. Afterwards a server that the
        run uses has them, or is seen to be another process or another learner's."""
        self._number += 1
        number, learner = self._number, self.learner
        assert learner is not None
        try:
            learner.publish(self.tensors, number=number)
        except KilledError:
            if self.learner is learner:
                self.learner = None
            return False
        except FAILURES:
            return False
        for client, server in zip(learner.servers, self.servers, strict=True):
            version, _, session = server.label.partition("@")
            if client.connected and server.alive and session == learner.identity.session:
                assert int(version) == number, f"{client.url} is used with version {version}"
        return True

    def end(self) -> None:
        """Ends the learner as a run ends."""
        if (learner := self.learner) is not None:
            self.learner = None
            with contextlib.suppress(KilledError):
                learner.close()

    def wait(self, seconds: float = SILENCE) -> None:
        """Lets time pass."""
        self.world.sleep(seconds)

    def take_over(self) -> None:
        """Has another learner replace the present one, and publish."""
        name = "another" if self.learner is None else self.learner.identity.name
        self.start("one" if name == "another" else "another", replaces=name)
        if self.learner is not None:
            self.change(0.1)
            self.publish()

    def _suspended(self) -> None:
        with self.world.undisturbed():
            self.meanwhile()

    def _settle(self) -> None:
        if not any(server.busy for server in self.servers):
            for one in (*self.hosts, *self.servers):
                one.settle()

    def check(self) -> None:
        """Checks what holds at any time."""
        for host in self.hosts:
            host.check()
        for server in self.servers:
            server.check()

    def heal(self) -> None:
        """Restarts what is dead and publishes undisturbed: all servers must hold the words."""
        self.world.plan([])
        self.world.down_until = 0.0
        for host in self.hosts:
            host.revive()
        for server in self.servers:
            while server.late and server.alive:
                self.network.deliver(server)
            if not server.alive or not self._repairable(server):
                server.start()
        self.ensure_learner()
        for _ in range(2):  # a host or server that was behind is not waited for
            self.change(0.1)
            published = self.publish()
            self.wait(LONG)
        assert published
        words = {name: array.tobytes() for name, array in self.tensors.items()}
        label = f"{self._number}@{self.learner.identity.session}"
        for client, server in zip(self.learner.servers, self.servers, strict=True):
            assert client.connected, client.last_error
            assert (server.label, server.paused) == (label, False)
            assert server.model.held == words
            assert server.answer(Request("GET", "/health", b"", [], b""))[0] == 200
        self.check()

    def _repairable(self, server: Server) -> bool:
        status, body = server.answer(Request("GET", "/health", b"", [], b""))
        return status == 200 or UNFINISHED.encode() in body
