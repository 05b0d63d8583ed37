"""Publishing to several servers of which one is ill; programs of a few lines play vLLM's part."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from jaxrl.bridge.base import POISONED, REFUSED, LostError, PoisonedError, RefusedError
from jaxrl.bridge.servers.control import ControlError, VllmServer
from jaxrl.bridge.swap import switch

DEAD = "EngineCore encountered an issue"


class Vllm(ThreadingHTTPServer):
    """Holds a version and is paused or not; `fails` says what a path answers instead."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.version, self.paused, self.fails = "default", False, dict[str, tuple[int, str]]()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        failure = self.fails.get(path, self.fails.get("*"))
        if failure is not None:
            return failure
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        if path == "/finish_weight_update":
            assert self.paused
            self.version = body["weight_version"]
        return 200, "{}"


class _Handler(BaseHTTPRequestHandler):
    server: Vllm

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        status, text = self.server.answer(self.path.partition("?")[0], body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def running() -> Iterator[tuple[Vllm, VllmServer]]:
    with Vllm() as vllm:
        threading.Thread(target=vllm.serve_forever, args=(0.01,), daemon=True).start()
        yield vllm, VllmServer(f"http://127.0.0.1:{vllm.server_address[1]}", timeout=30)
        vllm.shutdown()


@pytest.fixture
def two() -> Iterator[tuple[list[Vllm], list[VllmServer]]]:
    with ExitStack() as stack:
        pairs = [stack.enter_context(running()) for _ in range(2)]
        for _, server in pairs:
            server.connect(root="/x", wire="float32", sampler="float32")
        yield [vllm for vllm, _ in pairs], [server for _, server in pairs]


def publish(servers: list[VllmServer], version: int) -> None:
    switch(servers, "slot-0", version=version, in_flight="keep")


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:9")
    with running() as (_, server):
        assert server.healthy()


@pytest.mark.parametrize(
    ("path", "failure", "kind"),
    [
        ("*", (500, DEAD), LostError),  # between the end of its engine and its own
        ("/pause", (503, "no"), LostError),
        ("/update_weights", (500, f"{POISONED} no memory"), PoisonedError),
        ("/finish_weight_update", (500, DEAD), PoisonedError),
        ("/resume", (500, DEAD), PoisonedError),
        ("/update_weights", (500, f"{REFUSED} b: checksum"), RefusedError),
    ],
)
def test_one_that_fails_is_done_without_and_taken_back(two, path, failure, kind):
    (healthy, ill), servers = two
    publish(servers, 6)
    ill.fails[path] = failure
    publish(servers, 7)
    assert (healthy.version, healthy.paused) == ("7", False)
    assert [server.connected for server in servers] == [True, False]
    assert failure[1] in servers[1].trouble
    with pytest.raises(kind):
        publish(servers[1:], 8)  # where nobody goes on it is an error
    publish(servers, 8)
    ill.fails.clear()
    publish(servers, 9)
    assert [(v.version, v.paused) for v in (healthy, ill)] == [("9", False)] * 2
    assert all(server.connected for server in servers)


def test_one_that_comes_back_with_another_dtype_is_done_without(two):
    (healthy, changed), servers = two
    changed.fails["*"] = (503, "starting")
    publish(servers, 1)
    dtype = f"{REFUSED} the server computes in float16"
    changed.fails = {"/init_weight_transfer_engine": (500, dtype)}
    publish(servers, 2)
    assert (healthy.version, changed.version) == ("2", "default")
    assert (servers[1].connected, servers[1].trouble) == (False, dtype)


def test_a_run_may_begin_while_a_server_is_ill_but_not_with_a_wrong_one():
    with running() as (vllm, server):
        vllm.fails["*"] = (500, DEAD)
        server.connect(root="/x", wire="float32", sampler="float32")
        assert not server.connected
        vllm.fails["*"] = (401, "JAXRL_API_KEY")
        with pytest.raises(ControlError, match="JAXRL_API_KEY"):
            server.connect(root="/x", wire="float32", sampler="float32")
        vllm.fails["*"] = (500, f"{REFUSED} the server computes in float16")
        with pytest.raises(RefusedError, match="float16"):
            server.connect(root="/x", wire="float32", sampler="float32")
