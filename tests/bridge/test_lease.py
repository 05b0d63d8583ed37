"""An abandoned publish ends: the server resumes its old weights or reports ill health."""

import asyncio
import json
import selectors
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from jaxrl.bridge.base import POISONED, REFUSED, UNFINISHED, LearnerIdentity
from jaxrl.bridge.in_vllm import lease
from jaxrl.bridge.in_vllm.lease import Lease
from tests.bridge.cases import LEARNER

OTHER = LearnerIdentity("another run", "fedcba9876543210")
LEASE = 30.0  # seconds of the clock below
INIT, START, UPDATE, FINISH = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)


class Server:
    """A server behind the lease; `fails` overrides the response of a path."""

    def __init__(self) -> None:
        self.lease = Lease(self._answer)
        self.fails: dict[str, tuple[int, str]] = {}
        self.raises: dict[str, str] = {}
        self.seen: list[str] = []
        self.slow = 0.0
        self.publish: str | None = None  # identity that requests carry
        self.gone = asyncio.Event()  # the learner's connection has closed

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        self.seen.append(path + "?" * bool(scope["query_string"]) + scope["query_string"].decode())
        await receive()
        await asyncio.sleep(self.slow)
        if path in self.raises:
            raise RuntimeError(self.raises[path])
        status, text = self.fails.get(path, (200, "{}"))
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": text.encode()})

    async def call(self, path: str, learner: LearnerIdentity | None = LEARNER) -> tuple[int, str]:
        headers = {} if learner is None else lease.header(learner)
        if self.publish is not None:
            headers[lease.PUBLISH] = self.publish
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": query.encode(),
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
        }
        sent: list[Any] = []
        asked = False

        async def receive() -> Any:
            nonlocal asked
            if asked:
                await self.gone.wait()
                return {"type": "http.disconnect"}
            asked = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.lease(scope, receive, send)
        return sent[0]["status"], sent[1]["body"].decode()

    async def calls(self, *paths: str) -> list[int]:
        return [(await self.call(path))[0] for path in paths]

    async def health(self) -> int:
        return (await self.call("/health", None))[0]


class Clock(selectors.SelectSelector):
    """A clock that stands still while there is something to do, and then jumps to the next timer:
    a busy machine takes no time from a lease."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0 if timeout else timeout)
        self.now += timeout if timeout and not ready else 0.0
        return ready


def loop() -> asyncio.AbstractEventLoop:
    clock = Clock()
    made = asyncio.SelectorEventLoop(clock)
    made.time = lambda: clock.now
    return made


def serve(
    monkeypatch: pytest.MonkeyPatch, script: Callable[[Server], Awaitable[None]], seconds=LEASE
) -> None:
    monkeypatch.setenv(lease.SECONDS, str(seconds))

    async def run() -> None:
        await script(Server())

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


@pytest.mark.parametrize(
    "paths", [["/pause"], ["/pause", START], ["/pause", START, UPDATE, FINISH]], ids=len
)
def test_a_server_whose_weights_are_whole_resumes(monkeypatch, paths) -> None:
    async def script(server: Server) -> None:
        await server.calls(INIT, *paths)
        assert server.seen[-1] == paths[-1]
        await asyncio.sleep(3 * LEASE)
        assert server.seen[-1] == "/resume"
        assert await server.health() == 200

    serve(monkeypatch, script)


@pytest.mark.parametrize(
    "failure", [None, (500, f"{POISONED} half"), (500, "dead")], ids=["killed", "mixed", "dead"]
)
def test_mixed_weights_are_ill_until_next_publish(monkeypatch, failure) -> None:
    async def script(server: Server) -> None:
        if failure is not None:
            server.fails[UPDATE] = failure
        await server.calls(INIT, "/pause", START, UPDATE)
        assert await server.health() == 200
        await asyncio.sleep(3 * LEASE)
        assert "/resume" not in server.seen
        status, text = await server.call("/health")
        assert (status, UNFINISHED in text) == (503, True)
        # A refused publish repairs nothing.
        server.fails[UPDATE] = 500, f"{REFUSED} missing"
        assert await server.calls("/pause", START, UPDATE, "/resume") == [200, 200, 500, 200]
        assert await server.health() == 503
        server.fails.clear()
        assert await server.calls("/pause", START, UPDATE, FINISH, "/resume") == [200] * 5
        assert await server.health() == 200

    serve(monkeypatch, script)


@pytest.mark.parametrize("paused", [True, False])
def test_health_says_paused_only_if_it_is(monkeypatch, paused) -> None:
    async def script(server: Server) -> None:
        await server.calls(INIT, *["/pause"] * paused, START, UPDATE)
        await asyncio.sleep(3 * LEASE)
        status, text = await server.call("/health")
        assert (status, "is paused" in text) == (503, paused)

    serve(monkeypatch, script)


def test_closing_a_session_names_no_weights(monkeypatch) -> None:
    async def script(server: Server) -> None:
        await server.calls(INIT, "/pause", START, UPDATE)
        server.fails[UPDATE] = 500, f"{REFUSED} no payload"
        await server.calls("/pause", START, UPDATE, FINISH, "/resume")
        await server.calls("/pause")
        await asyncio.sleep(3 * LEASE)
        assert await server.health() == 503

    serve(monkeypatch, script)


@pytest.mark.parametrize("text", [f"{REFUSED} missing", f"{POISONED} half: {REFUSED} missing"])
def test_application_errors_count_as_responses(monkeypatch, text) -> None:
    async def script(server: Server) -> None:
        server.raises[UPDATE] = text
        with pytest.raises(RuntimeError):
            await server.calls(INIT, "/pause", START, UPDATE)
        await asyncio.sleep(3 * LEASE)
        assert await server.health() == (503 if POISONED in text else 200)

    serve(monkeypatch, script)


def test_late_learner_is_refused(monkeypatch) -> None:
    """It was stopped, and the server has resumed: its load would come without a pause."""

    async def script(server: Server) -> None:
        await server.calls(INIT, "/pause", START)
        await asyncio.sleep(3 * LEASE)
        for path in (START, UPDATE, FINISH, "/resume"):
            status, text = await server.call(path)
            assert (status, REFUSED in text, "publish again" in text) == (409, True, True)
        assert await server.calls("/pause", START, UPDATE, FINISH, "/resume") == [200] * 5
        await asyncio.sleep(3 * LEASE)
        assert server.seen.count("/resume") == 2

    serve(monkeypatch, script)


def test_a_long_request_keeps_its_lease(monkeypatch) -> None:
    async def script(server: Server) -> None:
        await server.calls(INIT, "/pause", START)
        server.slow = 4 * LEASE
        assert await server.calls(UPDATE, FINISH, "/resume") == [200] * 3
        assert server.seen.count("/resume") == 1

    serve(monkeypatch, script)


def test_server_that_cannot_resume_is_ill(monkeypatch) -> None:
    async def script(server: Server) -> None:
        server.fails["/resume"] = 500, "dead"
        await server.calls(INIT, "/pause")
        await asyncio.sleep(3 * LEASE)
        assert await server.health() == 503

    serve(monkeypatch, script)


SLEEP = "/sleep?level=2&mode=keep"
WEIGHTS, CACHE = "/wake_up?tags=weights", "/wake_up?tags=kv_cache"


async def fall_asleep(server: Server) -> asyncio.Task:
    server.publish = "a"
    await server.calls(INIT)
    sleeping = asyncio.create_task(server.call(SLEEP))
    await asyncio.sleep(3 * LEASE)
    assert server.seen[-1] == SLEEP
    assert not sleeping.done()
    return sleeping


def test_a_sleeping_server_waits_for_its_learner(monkeypatch) -> None:
    async def script(server: Server) -> None:
        sleeping = await fall_asleep(server)
        assert await server.health() == 200
        server.gone.set()
        assert await server.calls(WEIGHTS, START, UPDATE, FINISH, CACHE, "/resume") == [200] * 6
        assert (await sleeping)[0] == 200
        seen = list(server.seen)
        await asyncio.sleep(3 * LEASE)
        assert server.seen == seen
        assert await server.health() == 200
        # Awake, it is not asked to wake.
        assert await server.calls("/pause", WEIGHTS, START, UPDATE, FINISH, CACHE) == [200] * 6
        assert WEIGHTS not in server.seen[len(seen) :]
        assert CACHE not in server.seen[len(seen) :]

    serve(monkeypatch, script)


def test_a_server_whose_learner_died_asleep_is_ill_until_a_publish(monkeypatch) -> None:
    async def script(server: Server) -> None:
        await fall_asleep(server)
        server.gone.set()
        await asyncio.sleep(3 * LEASE)
        status, text = await server.call("/health")
        assert (status, "sleeps and has the weights of no version" in text) == (503, True)
        assert server.seen[-1] == SLEEP  # not resumed
        assert (await server.call(WEIGHTS))[0] == 409  # the publish has lapsed
        server.publish = "b"
        status, text = (await server.calls("/pause"))[0], (await server.call(START))[1]
        assert (status, "sampler.sleep = true" in text) == (200, True)
        server.fails[UPDATE] = 500, f"{REFUSED} missing"
        assert await server.calls(WEIGHTS, START, UPDATE) == [200, 200, 500]
        for path in (CACHE, "/wake_up", "/resume"):
            status, text = await server.call(path)
            assert (status, POISONED in text) == (409, True)
        assert await server.health() == 503
        server.fails.clear()
        again = ("/pause", WEIGHTS, START, UPDATE, FINISH, CACHE, "/resume")
        assert await server.calls(*again) == [200] * 7
        assert await server.health() == 200

    serve(monkeypatch, script)


def test_a_server_whose_cache_sleeps_wakes_it_to_resume(monkeypatch) -> None:
    async def script(server: Server) -> None:
        await fall_asleep(server)
        server.gone.set()
        await server.calls(WEIGHTS, START, UPDATE, FINISH)
        await asyncio.sleep(3 * LEASE)
        assert server.seen[-1] == CACHE
        assert await server.health() == 200

    serve(monkeypatch, script)


@pytest.mark.parametrize("sender", [OTHER, None], ids=["another", "nobody"])
def test_requests_of_others_are_refused_by_name(monkeypatch, sender) -> None:
    changing = ("/pause", START, UPDATE, FINISH, "/resume", "/v1/load_lora_adapter")

    async def script(server: Server) -> None:
        assert (await server.call("/pause", sender))[0] == 200  # nobody owns the server yet
        await server.call("/resume", sender)
        await server.calls(INIT)
        before = list(server.seen)
        for path in (*changing, "/shutdown_weight_transfer_engine"):
            status, text = await server.call(path, sender)
            assert (status, json.loads(text)["error"].startswith(REFUSED)) == (409, True)
            assert LEARNER.name in text
        assert server.seen == before
        for path in ("/v1/completions", "/health", "/weight_info"):
            assert (await server.call(path, sender))[0] == 200
        server.fails[INIT] = 500, f"{REFUSED} another learner"
        await server.call(INIT, OTHER)
        assert (await server.call("/pause", OTHER))[0] == 409
        assert await server.calls("/resume", "/shutdown_weight_transfer_engine") == [200, 200]
        assert (await server.call("/pause", sender))[0] == 200

    serve(monkeypatch, script, seconds=60)


def test_the_lease_must_be_a_number(monkeypatch) -> None:
    for text in ("0", "-1", "nan", "inf", "soon"):
        monkeypatch.setenv(lease.SECONDS, text)
        with pytest.raises(ValueError, match=f"JAXRL_LEASE = '{text}'"):
            Server()
