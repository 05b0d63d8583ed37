"""Adapters alone under every fault of the network, on the simulation of the model.

A learner that is suspended for longer than a server's lease, while it publishes the base weights or
an adapter, must leave no server in use without them.
"""

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxrl.bridge import adapters
from jaxrl.bridge.adapters import AdapterPublisher, in_place
from jaxrl.bridge.base import LearnerIdentity
from jaxrl.bridge.servers.control import VllmServer
from jaxrl.bridge.store.objects import Store
from jaxrl.bridge.store.publisher import StorePublisher
from tests.bridge.cases import ListSource
from tests.bridge.protocol.processes import Request, Server
from tests.bridge.protocol.scene import F16, FAILURES, LONG, STORE, Scene
from tests.bridge.protocol.world import Fault
from tests.bridge.test_adapters import BF16, SPECS, adapted

ADAPTED = functools.cache(lambda: adapted(0))
LOAD = "/v1/load_lora_adapter"
SITES = (
    "/fetch_weights",
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/resume",
    "/weight_info",
    "/v1/models",
    LOAD,
)
KINDS = (
    *("suspend before", "suspend after", "lose request", "lose answer", "late", "reset"),
    *("kill server before", "kill server after"),
)
AGAIN = "suspend before", "reset"  # strike at the second server, too


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """Yields servers that take adapters, too."""
    plain, held = Server._route, dict[Any, dict[str, str]]()

    def route(self: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
        mine = held.setdefault(self.engine, {})  # gone when the server is started again
        if path == LOAD:
            mine[body["lora_name"]] = body["lora_path"]
        elif path == "/v1/unload_lora_adapter":
            mine.pop(body["lora_name"], None)
        elif path == "/v1/models":
            return {"data": [{"id": name} for name in mine]}
        return plain(self, path, body)

    monkeypatch.setattr(Server, "_route", route)
    with Scene() as made:
        monkeypatch.setattr(adapters, "ThreadPoolExecutor", made.pool)
        yield made


class Run:
    """A learner that publishes adapters over one base."""

    def __init__(self, scene: Scene, root: Path, *, session: int) -> None:
        self.scene = scene
        self.identity = LearnerIdentity("one", f"{session:016x}")
        self.servers = [VllmServer(server.url, timeout=60.0) for server in scene.servers]
        self._publisher = AdapterPublisher(
            self.servers,
            in_place(root),
            specs=SPECS,
            base="base",
            wire=BF16,
            publish_base=self._publish_base,
            learner=self.identity,
        )

    def _publish_base(self, servers: Sequence[VllmServer], base: object, version: int) -> None:
        words = {name: array.tobytes() for name, array in self.scene.tensors.items()}
        self.scene.world.published[self.identity.session, version] = words
        common: Any = {"wire": F16, "sampler": F16, "learner": self.identity}
        with StorePublisher(servers, Store(STORE, None), **common) as publisher:
            publisher.publish(ListSource(self.scene.tensors), version=version)

    def publish(self, *, version: int) -> str:
        """Publishes; every server that it counts as connected samples from base and adapter."""
        name, _ = self._publisher.publish(ADAPTED(), version=version)
        for client, server in zip(self.servers, self.scene.servers, strict=True):
            if client.connected and server.alive:
                assert server.label.endswith(f"@{self.identity.session}"), server.label
                assert not server.paused
                assert name in names(server)
        self.scene.check()
        return name


def names(server: Server) -> list[str]:
    status, body = server.answer(Request("GET", "/v1/models", b"", [], b""))
    assert status == 200
    return [one["id"] for one in json.loads(body)["data"]]


@pytest.mark.parametrize("site", SITES)
def test_no_server_in_use_lacks_base_or_adapter(scene: Scene, tmp_path: Path, site: str) -> None:
    scene.change(1.0)  # the base is not what servers start with
    faults = [(kind, 0) for kind in KINDS] + [(kind, 1) for kind in AGAIN]
    for session, (kind, nth) in enumerate(faults, start=1):
        run = Run(scene, tmp_path, session=session)
        scene.world.plan([Fault(site, nth, kind)])
        for version in range(2):
            try:
                run.publish(version=version)
            except FAILURES:
                scene.check()
        scene.world.plan([])
        for server in scene.servers:
            if not server.alive:
                server.start()
        for version in range(2, 4):
            run.publish(version=version)
            scene.wait(LONG)
        assert all(client.connected for client in run.servers)
