"""Publishing adapters alone: versions, refusals, and servers without the base weights."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.bridge.adapters import AdapterPublisher, Delivery, in_place
from jaxrl.bridge.base import BehindError, RefusedError, UnavailableError
from jaxrl.huggingface import peft
from jaxrl.models import lora, spec
from jaxrl.models.model import decoder
from tests.bridge.cases import QWEN3, Recorder, params

BF16 = np.dtype(jnp.bfloat16)
SPECS = lora.Adapted(
    lora.adapter_specs(decoder(QWEN3).specs, rank=2, targets=["*_proj"]),
    decoder(QWEN3).specs,
    alpha=4.0,
)
FROZEN = jax.tree.map(lambda x: x.astype(BF16), params(QWEN3, 0))


def adapted(seed: int) -> lora.Adapted:
    return lora.Adapted(spec.init(SPECS.adapters, jax.random.key(seed), dtype=BF16), FROZEN, 4.0)


class Server(Recorder):
    """A server that records its adapters."""

    shared = False

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url, self.label, self.lost, self.refuses = url, "default", False, False
        self.adapters: dict[str, Path] = {}

    def serves(self, label: str) -> bool:
        if self.lost:
            raise UnavailableError(self.url)
        return label == self.label

    def adapter_names(self, prefix: str) -> list[str]:
        return [name for name in self.adapters if name.startswith(prefix)]

    def load_adapter(self, name: str, directory: Path) -> None:
        if self.refuses:
            raise RefusedError("rank 2 is too large")
        assert self.label != "default"
        peft.load_adapter(directory, SPECS, dtype=BF16)
        self.adapters[name] = directory

    def unload_adapter(self, name: str) -> None:
        self.adapters.pop(name, None)


@pytest.fixture
def servers() -> list[Server]:
    return [Server("http://a"), Server("http://b")]


@pytest.fixture
def publisher(servers: list[Server], tmp_path: Path) -> AdapterPublisher:
    def publish_base(those, base, version):
        assert base is FROZEN
        for server in those:
            server.label = str(version)
            server.adapters.clear()

    return AdapterPublisher(
        servers, in_place(tmp_path), specs=SPECS, base="base", wire=BF16, publish_base=publish_base
    )


def test_last_two_adapters_are_kept(publisher, servers, tmp_path):
    names = [publisher.publish(adapted(version), version=version)[0] for version in range(3)]
    assert len({*names}) == 3
    for server in servers:
        assert server.label == "0"  # the base was published once
        assert list(server.adapters) == names[1:]
        kept = peft.load_adapter(server.adapters[names[2]], SPECS, dtype=BF16)
        jax.tree.map(np.testing.assert_array_equal, kept, adapted(2).adapters)
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:]}


def test_servers_keep_their_adapters_when_all_refuse(publisher, servers, tmp_path):
    name, _ = publisher.publish(adapted(0), version=0)
    for server in servers:
        server.refuses = True
    with pytest.raises(RefusedError, match="too large"):
        publisher.publish(adapted(1), version=1)
    assert [list(server.adapters) for server in servers] == [[name], [name]]
    assert [path.name for path in tmp_path.iterdir()] == [name]
    servers[0].refuses = False  # one server is enough
    publisher.publish(adapted(1), version=1)
    assert [len(server.adapters) for server in servers] == [2, 1]


def test_server_refusing_the_base_is_skipped(servers, tmp_path):
    """It may have restarted with another dtype."""
    refusing: list[str] = []

    def publish_base(those, base, version):
        del base
        for server in those:
            if server.url in refusing:
                raise RefusedError("computes in float16")
            server.label = str(version)

    publisher = AdapterPublisher(
        servers, in_place(tmp_path), specs=SPECS, base="base", wire=BF16, publish_base=publish_base
    )
    publisher.publish(adapted(0), version=0)
    servers[1].label = "default"
    refusing.append("http://b")
    publisher.publish(adapted(1), version=1)
    assert [len(server.adapters) for server in servers] == [2, 1]
    refusing.clear()
    publisher.publish(adapted(2), version=2)
    assert [server.label for server in servers] == ["0", "2"]
    refusing.extend(server.url for server in servers)
    for server in servers:
        server.label = "default"
    with pytest.raises(RefusedError, match="float16"):
        publisher.publish(adapted(3), version=3)


def test_a_host_that_cannot_read_the_store_gets_no_base(servers, tmp_path):
    """The base is large, and would be written at every publish."""
    based: list[list[str]] = []
    cut = {"http://b"}

    def publish_base(those, source, version):
        del source
        based.append([server.url for server in those])
        for server in those:
            if server.url not in cut:
                server.label = str(version)

    def send(directory, _):
        def place(server):
            if server.url in cut:
                raise BehindError("no answer")
            return directory

        return place

    publisher = AdapterPublisher(
        servers,
        Delivery(tmp_path, send),
        specs=SPECS,
        base="base",
        wire=BF16,
        publish_base=publish_base,
    )
    for version in range(3):
        publisher.publish(adapted(version), version=version)
    assert servers[1].failed == "no answer"
    cut.clear()
    publisher.publish(adapted(3), version=3)
    assert based == [["http://a", "http://b"], ["http://b"]]
    assert [server.label for server in servers] == ["0", "3"]
    # Requests in flight may name the version before.
    assert servers[1].adapters.keys() == servers[0].adapters.keys()


def test_a_returning_server_gets_base_and_adapter(publisher, servers):
    publisher.publish(adapted(0), version=0)
    servers[1].lost = True
    publisher.publish(adapted(1), version=1)
    assert [len(server.adapters) for server in servers] == [2, 1]
    servers[1].lost, servers[1].label = False, "default"
    name, _ = publisher.publish(adapted(2), version=2)
    assert [server.label for server in servers] == ["0", "2"]
    # Requests in flight may name the version before.
    assert servers[1].adapters.keys() == servers[0].adapters.keys()
    assert list(servers[1].adapters)[-1] == name
    for server in servers:
        server.lost = True
    with pytest.raises(UnavailableError):
        publisher.publish(adapted(3), version=3)


@pytest.mark.parametrize("shared", [False, True])
def test_what_killed_processes_left_is_unloaded(servers, publisher, tmp_path, shared):
    """A server that belongs to one learner keeps nobody's adapters; another keeps other runs'."""
    first = publisher.publish(adapted(0), version=0)[0]  # killed now: it unloads nothing
    other = "jaxrl-another-run-0"
    for server in servers:
        server.shared, server.label = shared, "default"
        server.adapters[other] = server.adapters[first]

    def publish_base(those, base, version):
        for server in those:
            server.label = str(version)

    with AdapterPublisher(
        servers, in_place(tmp_path), specs=SPECS, base="base", wire=BF16, publish_base=publish_base
    ) as again:
        second = again.publish(adapted(1), version=0)[0]
        assert [list(s.adapters) for s in servers] == [[other, second] if shared else [second]] * 2
    assert [list(s.adapters) for s in servers] == [[other] if shared else []] * 2


def test_a_version_that_nobody_took_leaves_nothing(publisher, servers, tmp_path):
    for server in servers:
        server.lost = True
    with pytest.raises(UnavailableError):
        publisher.publish(adapted(0), version=0)
    assert list(tmp_path.iterdir()) == []
