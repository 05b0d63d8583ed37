"""Load balancing and failover, with stand-ins for the servers."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from jaxrl.sampling.vllm.router import Router, SamplerError

MOST = 16  # requests per server; affinity allows 2 more than the least-loaded server has


class Server(ThreadingHTTPServer):
    """Answers with its name while `open` is set, and counts requests."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.status, self.got, self.open = name, 200, 0, threading.Event()
        self.open.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got += 1
        self.server.open.wait(100)
        self.send_response(self.server.status)
        self.send_header("Content-Length", "1")
        self.end_headers()
        self.wfile.write(self.server.name.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def running(name: str) -> Iterator[Server]:
    with Server(name) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.open.set()
        server.shutdown()


class Asking:
    """Sends requests to two servers from many threads."""

    def __init__(self, servers: list[Server], pool: ThreadPoolExecutor) -> None:
        self.servers, self._pool = servers, pool
        self.router = Router([s.url for s in servers], max_requests=MOST, timeout=100, headers={})

    def one(self, *keys: int) -> str:
        return self.router.post({}, read=str, about="it", keys=keys)

    def begin(self, *keys: int) -> Future[str]:
        """Starts a request and returns once a server has it."""
        before = sum(server.got for server in self.servers)
        future = self._pool.submit(self.one, *keys)
        wait_for(lambda: sum(server.got for server in self.servers) > before)
        return future


def wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(6000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it never happened")


@pytest.fixture
def asking() -> Iterator[Asking]:
    with ExitStack() as stack:
        servers = [stack.enter_context(running(name)) for name in "AB"]
        pool = stack.enter_context(ThreadPoolExecutor(2 * MOST))
        made = Asking(servers, pool)
        yield made
        made.router.abort()
        for server in servers:
            server.open.set()
        pool.shutdown()
        made.router.close()


def test_idle_server_is_preferred(asking):
    slow, fast = asking.servers
    slow.open.clear()
    first = asking.begin()
    assert [asking.one() for _ in range(20)] == ["B"] * 20
    slow.open.set()
    assert first.result() == "A"
    assert (slow.got, fast.got) == (1, 20)


def test_equally_busy_servers_take_turns(asking):
    assert Counter(asking.one() for _ in range(20)) == {"A": 10, "B": 10}


def test_known_prefix_stays_on_its_server(asking):
    begun = {key: asking.one(key, 100 + key) for key in range(7)}
    assert {*begun.values()} == {"A", "B"}
    for key in (3, 0, 6, 6, 1, 2, 5, 4, 3, 3):  # by each of its keys, in any order
        assert asking.one(key) == begun[key]
        assert asking.one(100 + key, key) == begun[key]
    asking.router.use([server.url for server in asking.servers])  # the caches are empty now
    found = {key: {asking.one(key) for _ in range(2)} for key in range(7)}
    assert found.keys() == begun.keys()
    assert all(len(where) == 1 for where in found.values())


def test_prefixes_do_not_pile_up(asking, monkeypatch):
    monkeypatch.setattr("jaxrl.sampling.vllm.router._REMEMBERED", 10)
    for key in range(40):
        assert asking.one(key) == asking.one(key)
        assert len(asking.router._affinity) <= 11


def test_affinity_ends_under_load(asking):
    here = asking.one(7)
    for server in asking.servers:
        server.open.clear()
        server.got = 0
    asked = [asking.begin(7) for _ in range(3)]
    gone = asking.begin(7)
    for server in asking.servers:
        server.open.set()
    assert [future.result() for future in asked] == [here] * 3
    assert gone.result() != here
    assert asking.one(7) != here  # the affinity has moved


def test_fast_failing_server_attracts_no_requests(asking):
    """It always has the fewest requests in flight. A dead engine answers 500."""
    failing, _ = asking.servers
    for status in (500, 503):
        failing.status, failing.got = status, 0
        assert [asking.one(key) for key in range(4)] == ["B"] * 4
        assert 1 <= failing.got <= 4
        asking.router.use([server.url for server in asking.servers])
    for server in asking.servers:
        server.status = 400
    with pytest.raises(SamplerError, match="did not answer it: 400"):
        asking.one()


def test_requests_leave_an_outdated_server(asking):
    """It may stay paused and would hold the requests until their timeout."""
    paused, well = asking.servers
    assert asking.one() == "A"  # over a connection that stays open
    assert asking.one() == "B"
    paused.open.clear()
    flying = [asking.begin(key) for key in (1, 1, 1)]
    assert paused.got == 1 + 3
    asking.router.use([well.url])
    assert [future.result(250) for future in flying] == ["B"] * 3
    assert [asking.one() for _ in range(4)] == ["B"] * 4
    assert paused.got == 1 + 3
    paused.open.set()
    asking.router.use([server.url for server in asking.servers])
    assert {asking.one() for _ in range(4)} == {"A", "B"}


def test_new_server_takes_requests_and_one_that_has_left_finishes_its_own(asking):
    first, second = asking.servers
    with running("C") as new:
        second.open.clear()
        flying = [asking.begin() for _ in range(2)]
        assert (first.got, second.got) == (1, 1)
        asking.router.use([first.url, new.url], left=[second.url])
        assert {asking.one() for _ in range(6)} == {"A", "C"}
        second.open.set()
        assert sorted(future.result(250) for future in flying) == ["A", "B"]
        assert second.got == 1


def test_aborting_wakes_waiting_requests(asking):
    for server in asking.servers:
        server.open.clear()
    flying = [asking.begin() for _ in range(2 * MOST)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(asking.one)
        asking.router.abort()
        for future in [waiting, *flying]:
            assert future.exception(250) is not None
