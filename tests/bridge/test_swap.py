"""Weight sync to several servers when one fails, with stand-ins for vLLM."""

import functools
import itertools
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxrl.bridge import swap
from jaxrl.bridge.base import (
    LAPSED,
    POISONED,
    REFUSED,
    UNFINISHED,
    BehindError,
    PoisonedError,
    RefusedError,
    Timings,
    UnavailableError,
)
from jaxrl.bridge.servers import control
from jaxrl.bridge.servers.control import VllmServer
from jaxrl.bridge.servers.routes import ControlError
from jaxrl.bridge.store.objects import StoreError
from jaxrl.bridge.swap import swap_weights
from jaxrl.builders.weight_sync import PublishToServers, Send
from jaxrl.fleet.addresses import Addresses
from jaxrl.sampling.vllm.sampler import VllmSampler
from tests.bridge.cases import LEARNER

ROLES = dict.fromkeys(("wire", "sampler", "logits"), "float32")
DEAD = "EngineCore encountered an issue"


class Vllm(ThreadingHTTPServer):
    """Keeps a version and a paused state; `fails` overrides the response of a path."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.version, self.paused, self.fails = "default", False, dict[str, tuple[int, str]]()

    def respond(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        failure = self.fails.get(path, self.fails.get("*"))
        if failure is not None:
            return failure
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        if path == "/finish_weight_update":
            assert self.paused
            self.version = body["weight_version"].partition("@")[0]
        return 200, "{}"


class _Handler(BaseHTTPRequestHandler):
    server: Vllm

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        status, text = self.server.respond(self.path.partition("?")[0], body)
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
            server.connect(root="/x", **ROLES, learner=LEARNER)
        yield [vllm for vllm, _ in pairs], [server for _, server in pairs]


def publish(servers: list[VllmServer], version: int) -> None:
    swap_weights(servers, lambda s: s.update("slot-0", version=version, in_flight="keep"))


def test_proxies_of_the_environment_are_ignored(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:9")
    with running() as (_, server):
        assert server.healthy()


@pytest.mark.parametrize(
    ("path", "failure", "kind"),
    [
        ("*", (500, DEAD), UnavailableError),  # the engine is dead, the server not yet
        ("/pause", (503, "no"), UnavailableError),
        ("/update_weights", (500, f"{POISONED} no memory"), PoisonedError),
        ("/finish_weight_update", (500, DEAD), PoisonedError),
        ("/resume", (500, DEAD), PoisonedError),
        ("/update_weights", (500, f"{REFUSED} b: missing"), RefusedError),
    ],
)
def test_a_failed_server_is_skipped_and_recovers(two, path, failure, kind):
    (healthy, failing), servers = two
    publish(servers, 6)
    failing.fails[path] = failure
    publish(servers, 7)
    assert (healthy.version, healthy.paused) == ("7", False)
    assert [server.connected for server in servers] == [True, False]
    assert failure[1] in servers[1].last_error
    with pytest.raises(kind):
        publish(servers[1:], 8)  # an error if no server succeeds
    publish(servers, 8)
    failing.fails.clear()
    publish(servers, 9)
    assert [(v.version, v.paused) for v in (healthy, failing)] == [("9", False)] * 2
    assert all(server.connected for server in servers)


def test_a_server_that_missed_a_version_before_its_update_is_not_used(two):
    """As one whose host cannot fetch the version, or whose whole chunks cannot be written."""
    (healthy, late), servers = two
    publish(servers, 6)
    full = StoreError("the store is full")

    def update(server: VllmServer) -> Timings:
        if server is servers[1]:
            raise full
        return server.update("payload", version=7, in_flight="keep")

    swap_weights(servers, update)
    assert (healthy.version, late.version) == ("7", "6")
    assert [(server.connected, server.last_error) for server in servers] == [
        (True, ""),
        (False, str(full)),
    ]
    publish(servers, 8)
    assert (healthy.version, late.version) == ("8", "8")
    assert all(server.connected for server in servers)


def test_refusals_are_quoted_without_what_vllm_adds(two):
    (_, refusing), servers = two
    publish(servers, 6)
    said = (
        f"{REFUSED} the server takes weights from learner 'a'; start with JAXRL_TAKE_OVER='a \"b'"
    )
    after = ", please check the stack trace above for the root cause"
    answer = {"error": {"message": f"Worker failed with error '{said}'{after}", "code": 500}}
    refusing.fails["/update_weights"] = 500, json.dumps(answer)
    publish(servers, 7)
    assert servers[1].last_error == said
    refusing.fails["/update_weights"] = 409, json.dumps({"error": said})
    publish(servers, 8)
    assert servers[1].last_error == said


@pytest.mark.parametrize("path", ["/start_weight_update", "/update_weights", "/resume"])
def test_a_learner_whose_publish_lapsed_publishes_again(two, path):
    """As one that was suspended for longer than the server's lease."""
    (lapsed, _), servers = two
    publish(servers[:1], 6)
    respond, refusals = lapsed.respond, [(409, f"{REFUSED} {LAPSED}: publish again")]

    def once(asked: str, body: dict[str, Any]) -> tuple[int, str]:
        return refusals.pop() if asked == path and refusals else respond(asked, body)

    lapsed.respond = once
    publish(servers[:1], 7)
    assert not refusals
    assert (lapsed.version, lapsed.paused, servers[0].connected) == ("7", False, True)


def test_server_with_another_dtype_is_skipped(two):
    (healthy, changed), servers = two
    changed.fails["*"] = (503, "starting")
    publish(servers, 1)
    dtype = f"{REFUSED} the server computes in float16"
    changed.fails = {"/init_weight_transfer_engine": (500, dtype)}
    publish(servers, 2)
    assert (healthy.version, changed.version) == ("2", "default")
    assert (servers[1].connected, servers[1].last_error) == (False, dtype)


def test_undelivered_update_is_a_refusal(two):
    """Nothing was touched, so the old weights are served again."""
    (_, failing), servers = two
    publish(servers, 1)
    failing.fails["/update_weights"] = (422, "update_info: not a dictionary")
    with pytest.raises(RefusedError, match="not a dictionary"):
        publish(servers[1:], 2)
    assert (failing.version, failing.paused) == ("1", False)


def test_unopened_session_does_not_poison(two):
    (_, failing), servers = two
    failing.fails["/start_weight_update"] = (500, "already active")
    with pytest.raises(UnavailableError, match="already active"):
        publish(servers[1:], 2)
    failing.fails.clear()
    publish(servers[1:], 3)
    assert (failing.version, failing.paused) == ("3", False)


@pytest.mark.parametrize("health", [f"{UNFINISHED} the learner was silent", DEAD])
def test_unfinished_publish_is_followed_by_the_next(two, health):
    (_, ill), servers = two
    publish(servers, 1)
    servers[1].connected = False
    ill.fails["/health"] = (503, health)
    if health == DEAD:
        with pytest.raises(UnavailableError, match=DEAD):
            publish(servers[1:], 2)
    else:
        publish(servers[1:], 2)
    assert ill.version == ("1" if health == DEAD else "2")


@pytest.mark.parametrize(("version", "told"), [("0.32.0", 0), ("0.32.0+cpu", 0), ("0.33.0", 1)])
def test_untried_version_is_reported_once(version, told):
    lines = []
    with running() as (vllm, server):
        vllm.fails["/version"] = (200, json.dumps({"version": version}))
        server.connect(root="/x", **ROLES, learner=LEARNER)
        client = VllmSampler([server.url], max_positions=8, vocab_size=8)
        send = PublishToServers(
            Send(lambda params, *, version: (None, Timings()), lambda servers: None),
            [server],
            client=client,
            note=lines.append,
            learner=LEARNER,
        )
        for step in range(3):
            send({}, version=step)
        client.close()
    assert len(lines) == told
    assert all(f"{server.url} runs vLLM 0.33.0" in line for line in lines)


def test_a_server_that_does_not_answer_is_seldom_asked(two, monkeypatch):
    """As one behind a link that swallows packets, which would hold up every publish."""
    (_, dead), servers = two
    monkeypatch.setattr(control, "PROBE_TIMEOUT", 0.2)
    looks = map(float, itertools.count())  # the clock moves with each look at it
    own = SimpleNamespace(monotonic=lambda: next(looks), perf_counter=time.perf_counter)
    monkeypatch.setattr(control, "time", own)
    asked, answer, respond = list[str](), threading.Event(), dead.respond

    def silent(path: str, body: dict[str, Any]) -> tuple[int, str]:
        asked.append(path)
        return respond(path, body) if answer.wait(250) else (500, "")

    dead.respond = silent
    servers[1].fail(UnavailableError("it did not answer"))
    for version in range(1, 9):
        publish(servers, version)
        assert not servers[1].connected
    while not asked:  # the server's thread may begin after the time-out
        time.sleep(0.01)
    assert asked == ["/health"]
    monkeypatch.setattr(swap, "_ALL_BEHIND", 0.0)
    with pytest.raises(UnavailableError, match=f"{servers[1].url}: GET {servers[1].url}/health"):
        publish(servers[1:], 9)
    answer.set()
    monkeypatch.setattr(swap, "_ALL_BEHIND", 30.0)
    publish(servers[1:], 10)  # waits until it asks again
    assert dead.version == "10"


def test_the_run_says_which_server_is_behind_and_by_how_much(two):
    _, servers = two
    url, lines = servers[1].url, list[str]()
    client = VllmSampler([server.url for server in servers], max_positions=8, vocab_size=8)

    def send(failure: Exception | None, *, version: int) -> tuple[None, Timings]:
        def update(server: VllmServer) -> Timings:
            if failure is not None and server is servers[1]:
                raise failure
            return server.update("payload", version=version, in_flight="keep")

        return None, swap_weights(servers, update)

    way, keys = Send(send, lambda servers: None), {"client": client, "learner": LEARNER}
    publish = PublishToServers(way, servers, note=lines.append, **keys)
    silent = BehindError("its host has no answer from s3://a-bucket for 12 s")
    for version, failure in enumerate([None, silent, silent, silent, None, None]):
        metrics = publish(failure, version=version)
        behind = version if failure else 0
        assert metrics["sampler/servers"] == (1 if failure else 2)
        assert metrics["sampler/versions_behind"] == behind
    client.close()
    assert lines == [
        f"{url} is behind by 1 version; continuing with the other servers, retrying at each "
        f"publish: {silent}",
        f"{url} is back and serves version 4; it missed 3 versions",
    ]


def test_servers_come_and_go_between_publishes(two):
    (first, second), servers = two
    lines, used = list[str](), [servers[0]]
    present, leaving = [servers[0].url], list[str]()
    client = VllmSampler(present, max_positions=8, vocab_size=8)

    def send(params: Any, *, version: int) -> tuple[None, Timings]:
        update = functools.partial(VllmServer.update, payload="payload", in_flight="keep")
        return None, swap_weights(used, lambda server: update(server, version=version))

    def use(now: Sequence[VllmServer]) -> None:
        used[:] = now

    publish = PublishToServers(
        Send(send, use),
        servers[:1],
        client=client,
        note=lines.append,
        learner=LEARNER,
        listed=lambda: Addresses([*present], [*leaving]),
        connect={servers[1].url: servers[1]}.__getitem__,
    )
    assert publish({}, version=1)["sampler/servers"] == 1
    present.append(servers[1].url)
    assert second.version != "2"
    assert publish({}, version=2)["sampler/servers"] == 2
    assert (first.version, second.version) == ("2", "2")
    assert client.used["urls"] == sorted(present)
    leaving.append(present.pop())
    assert publish({}, version=3)["sampler/servers"] == 1
    assert (first.version, second.version) == ("3", "2")
    assert (client.used["urls"], client.used["left"]) == (present, leaving)
    present.clear()  # no server is left, so the last ones are asked
    assert publish({}, version=4)["sampler/servers"] == 1
    client.close()
    url = servers[1].url
    assert lines == [
        f"{url} is new and gets the present weights",
        f"{url} leaves: it finishes its requests and gets no more",
    ]


def test_connecting_tolerates_failed_servers_only():
    with running() as (vllm, server):
        vllm.fails["*"] = (500, DEAD)
        server.connect(root="/x", **ROLES, learner=LEARNER)
        assert not server.connected
        vllm.fails["*"] = (401, "JAXRL_API_KEY")
        with pytest.raises(ControlError, match="JAXRL_API_KEY"):
            server.connect(root="/x", **ROLES, learner=LEARNER)
        vllm.fails["*"] = (500, f"{REFUSED} the server computes in float16")
        with pytest.raises(RefusedError, match="float16"):
            server.connect(root="/x", **ROLES, learner=LEARNER)


def test_an_unreachable_server_is_unavailable(tmp_path: Path) -> None:
    absent = VllmServer("http://127.0.0.1:9", timeout=1.0)
    # It may start later.
    absent.connect(root=str(tmp_path), **ROLES, learner=LEARNER)
    assert not absent.connected
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:9/"):
        absent.update("slot-0", version=1, in_flight="keep")
    with pytest.raises(ValueError, match="not the http"):
        VllmServer("127.0.0.1:8000")
