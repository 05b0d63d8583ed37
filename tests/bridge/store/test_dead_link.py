"""A link that swallows what it is given holds up no publish of the other hosts."""

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxrl.bridge import swap
from jaxrl.bridge.base import UnavailableError
from jaxrl.bridge.in_vllm import relay
from jaxrl.bridge.owned_directory import MEMORY
from jaxrl.bridge.store import agent, clients, slots
from jaxrl.bridge.store.objects import StoreError
from tests.bridge.cases import ListSource
from tests.bridge.store.hosts import RelayedRecorder
from tests.bridge.store.test_store import check, publisher, weights
from tests.bridge.store.web_store import WebStore

sys.path.append(str(Path(__file__).parents[3] / "scripts"))
from benchmarks.link import Link

LONG = 100.0  # seconds; a test that waits for so long fails


class Swallower(Link):
    """A link that drops what comes back from the server while it is `dead`."""

    def __init__(self, target: int, **options: Any) -> None:
        self.dead = threading.Event()
        self.swallowed = 0  # blocks
        super().__init__(target, damage=self._damaged, **options)

    def _damaged(self, block: bytes) -> bytes:
        if not self.dead.is_set():
            return block
        self.swallowed += 1
        return b""


class Host(RelayedRecorder):
    """A server whose host reaches the store over a link; relay, socket and agent are real."""

    def __init__(self, directory: Path, link: Swallower, *, store: int) -> None:
        super().__init__(directory)
        self.payloads.mkdir(parents=True)
        self.link, self._store = link, store
        self.url = f"http://{directory.name}:8000"
        self.agent = agent.StoreAgent(self.payloads, key="a key")
        server = agent._Server(directory / relay.SOCKET, self.agent)
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()

    def ask(self, text: str) -> tuple[int, Any]:
        return super().ask(text.replace(f":{self._store}/", f":{self.link.port}/"))

    @property
    def held(self) -> list[int]:
        """Versions in complete slots, the newest first."""
        (directory,) = self.payloads.iterdir()
        return [slot.content.version for slot in slots.complete_slots(directory)]

    def answered(self) -> bool:
        url = f"http://127.0.0.1:{self.link.port}"
        (name,) = {"/".join(path.split("/")[:3]) for path in self.objects}
        return self.agent._objects(url + name).silence.seconds == 0

    objects: dict[str, bytes]


def until(right: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not right():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebStore]:
    """Runs a store; all time-outs are short. A host that gets no processor for longer than its
    patience blames the store."""
    monkeypatch.setattr(clients, "_READ", (1, 1, 1))
    monkeypatch.setattr(clients, "_WRITE", (1, 1, 1))
    monkeypatch.setattr(agent, "_PATIENCE", 3.0)
    monkeypatch.setattr(agent, "_PROBES", 0.1)
    monkeypatch.setattr(agent, "_PAUSE", 0.0)
    with WebStore() as running:
        yield running


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose path is short enough for a socket's, wherever tests keep their files."""
    with tempfile.TemporaryDirectory(dir=MEMORY, ignore_cleanup_errors=True) as name:
        yield Path(name)


@pytest.fixture
def hosts(store: WebStore, short: Path) -> Iterator[list[Host]]:
    with ExitStack() as stack:
        links = [stack.enter_context(Swallower(store.port)) for _ in "ab"]
        found = [
            Host(short / name, link, store=store.port)
            for name, link in zip("ab", links, strict=True)
        ]
        for one in found:
            one.objects = store.objects
        yield found


def test_a_dead_link_holds_up_no_publish(store: WebStore, hosts: list[Host]) -> None:
    """Its host fetches the version when the link is back, and takes part in the next publish.
    Meanwhile the slot that its server reads stays as it is."""
    near, far = hosts
    with publisher(hosts, f"http://127.0.0.1:{store.port}") as learner:

        def publish(number: int, *, late: bool) -> None:
            tensors, before = weights(number, changed=0.1), far.version
            learner.publish(ListSource(tensors), version=number)
            check(near, tensors)
            if late:
                assert far.version == before
                assert "store has not answered its host for" in far.failed
            else:
                check(far, tensors)

        publish(0, late=False)
        files = list(far.payloads.glob("*/slot-*/*"))
        served = {path: path.read_bytes() for path in files}
        assert served
        far.link.dead.set()
        publish(1, late=True)
        far.link.dead.clear()
        until(lambda: far.held == [1, 0])  # in the background
        assert all(path.read_bytes() == data for path, data in served.items())
        assert far.version == 0  # a server takes part in whole publishes only
        publish(2, late=False)
        assert far.whole == 0
        far.link.dead.set()
        swallowed = far.link.swallowed
        start = time.monotonic()
        for number in range(3, 7):
            publish(number, late=True)
        assert time.monotonic() - start < LONG
        assert far.link.swallowed > swallowed
        far.link.dead.clear()
        until(far.answered)
        publish(7, late=False)
        publish(8, late=False)
        assert far.whole == 1
        far.link.dead.set()
        publish(9, late=True)
        far.ask("{}")  # its learner leaves
        far.link.dead.clear()
        until(lambda: not any(far.payloads.iterdir()))


def test_a_slow_link_is_waited_for(store: WebStore, short: Path) -> None:
    """A link on which bytes arrive is not dead."""
    with Swallower(store.port, bandwidth=6e5) as link:
        slow = Host(short / "slow", link, store=store.port)
        with publisher([slow], f"http://127.0.0.1:{store.port}") as learner:
            timings = learner.publish(ListSource(weights(0)), version=0)
            check(slow, weights(0))
            assert timings.fetch > 2 * agent._PATIENCE


def test_a_slow_link_is_given_its_time_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time-out that was long enough for an object is the first for the next one."""
    monkeypatch.setattr(clients, "_WRITE", (1, 2, 4))
    now, limits, all_late = 0.0, list[float](), threading.Barrier(16)
    monkeypatch.setattr(clients, "time", SimpleNamespace(monotonic=lambda: now))

    def put(client: float) -> None:
        nonlocal now
        limits.append(client)
        if client < 4:
            all_late.wait(LONG)
            now = max(now, sum(one for one in (1.0, 2.0) if one <= client))
            all_late.wait(LONG)
            raise OSError("too slow")

    several = clients.Clients(lambda options, _: options["timeout"].total_seconds())
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(several.write, [put] * 16))
        assert sorted(limits) == [1] * 16 + [2] * 16 + [4] * 16
        limits.clear()
        list(pool.map(several.write, [put] * 32))
    assert limits == [4] * 32


def test_a_publish_waits_for_the_first_host(
    store: WebStore, hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap, "_PAUSE", 0.1)
    url = f"http://127.0.0.1:{store.port}"
    with publisher(hosts, url) as learner:
        learner.publish(ListSource(weights(0)), version=0)
        for host in hosts:
            host.link.dead.set()
        monkeypatch.setattr(swap, "_ALL_BEHIND", 1.0)
        with pytest.raises(UnavailableError) as error:
            learner.publish(ListSource(weights(1)), version=1)
        for host in hosts:
            assert host.version == 0
            assert f"{host.url}: the store has not answered its host for " in str(error.value)
            assert f"http://127.0.0.1:{host.link.port}/jaxrl-" in str(error.value)
        monkeypatch.setattr(swap, "_ALL_BEHIND", LONG)
        threading.Timer(0.5, hosts[1].link.dead.clear).start()
        learner.publish(ListSource(weights(2)), version=2)
        check(hosts[1], weights(2))
        assert hosts[0].version == 0


def test_an_upload_that_cannot_go_on_is_an_error(
    store: WebStore, hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Swallower(store.port) as link:
        learner = publisher(hosts[:1], f"http://127.0.0.1:{link.port}")
        hosts[0].link.dead.set()
        link.dead.set()
        with pytest.raises(StoreError, match=r"/chunks/.*: no answer for ([3-9]|\d\d+) s: "):
            learner.publish(ListSource(weights(0)), version=0)
        attempt, tries = clients.Clients._attempt, list[int]()

        def counted(own: Any, call: Any, kind: Any, seconds: Any) -> Any:
            return attempt(own, lambda client: tries.append(1) or call(client), kind, seconds)

        monkeypatch.setattr(clients.Clients, "_attempt", counted)
        learner.close()
        assert len(tries) == 1  # not with all time-outs, and not for each chunk
