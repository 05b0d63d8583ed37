"""Watch over publishes; runs inside vLLM's API server.

A learner that is killed during a publish leaves the server paused, and vLLM reports good health.
So every publish has a lease, which each request renews. When it expires, the server resumes with
its old weights, or reports ill health if some of them were replaced.

A learner on the server's GPU makes it sleep while it computes: a publish that begins with `/sleep`.
The answer to that request ends only when the learner closes the connection, to wake the server, or
dies. The lease begins then. Asleep, the server has no weights.
"""

import asyncio
import logging
import math
import os
import urllib.parse
from typing import Any

from jaxrl.bridge.base import LAPSED, POISONED, REFUSED, UNFINISHED, LearnerIdentity, marker
from jaxrl.bridge.in_vllm import relay
from jaxrl.bridge.in_vllm.auth import App, Message, Receive, Send, header_values, respond
from jaxrl.bridge.in_vllm.ownership import TAKE_OVER

SECONDS = "JAXRL_LEASE"
"""Environment variable of a server: seconds between two requests of a publish, by default 30."""
HEADER = "X-Jaxrl-Learner"
"""Header with the learner's identity, in every request that changes a server."""
PUBLISH = "X-Jaxrl-Publish"
"""Header with the identity of a publish, in its requests: one that comes late belongs to an earlier
publish."""

_DEFAULT = 30.0  # a learner makes the requests of a publish without a break
_CONNECT, _DISCONNECT = "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"
_START, _UPDATE, _FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
_PAUSE, _RESUME = "/pause", "/resume"
_SLEEP, _WAKE = "/sleep", "/wake_up"
_BEGIN = (_PAUSE, _SLEEP)  # a publish
_STEPS = (_WAKE, _START, _UPDATE, _FINISH, _RESUME)  # of a publish, after its beginning
_WEIGHTS, _CACHE = b"tags=weights", b"tags=kv_cache"  # queries of a wake
_OTHERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", relay.PATH)
_KEPT = 1 << 16  # bytes of a response to look at

_log = logging.getLogger("vllm.jaxrl")


def header(learner: LearnerIdentity) -> dict[str, str]:
    """Returns the header of a learner's requests."""
    return {HEADER: f"{learner.session} {urllib.parse.quote(learner.name)}"}


class Lease:
    """ASGI middleware that ends abandoned publishes and refuses requests of foreign learners."""

    def __init__(self, app: App) -> None:
        """Reads the lease from the environment; raises ValueError if it is not a number above 0."""
        self._app = app
        text = os.environ.get(SECONDS) or str(_DEFAULT)
        try:
            self._seconds = float(text)
        except ValueError:
            self._seconds = math.nan
        if not 0 < self._seconds < math.inf:
            raise ValueError(f"{SECONDS} = {text!r} must be a number of seconds above 0")
        self._owner: str | None = None  # header of the learner that connected last
        self._open = self._expired = False  # the publish
        self._publish: str | None = None  # its identity
        self._paused = False  # the server
        self._asleep: set[bytes] = set()  # its parts without memory
        self._loaded = self._unnamed = False  # as in `BridgeEngine`
        self._fault = ""  # reason of ill health
        self._busy = 0  # requests of the publish without a response so far
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers /health of an ill server, refuses a request, or passes it on."""
        path = scope["path"] if scope["type"] == "http" else ""
        if path == "/health" and self._fault:
            await respond(send, 503, {"error": f"{UNFINISHED} {self._fault}"})
        elif path not in (_CONNECT, _DISCONNECT, *_BEGIN, *_STEPS, *_OTHERS):
            await self._app(scope, receive, send)
        elif refusal := self._refusal(path, scope):
            await respond(send, 409, {"error": f"{REFUSED} {refusal}"})
        elif self._lacks_weights(path, scope):
            text = f"{POISONED} the server sleeps and has lost its weights; publish again"
            await respond(send, 409, {"error": text})
        elif path in (*_BEGIN, *_STEPS) and not _by_hand(path, scope):
            await self._step(path, scope, receive, send)
        else:
            status, _ = await self._pass(scope, receive, send)
            if status == 200 and path == _CONNECT:
                self._owner = _sender(scope)
            elif status == 200 and path == _DISCONNECT:
                self._owner = None

    def _refusal(self, path: str, scope: Message) -> str:
        if path == _CONNECT:  # the engine decides
            return ""
        if self._owner is not None and self._owner != _sender(scope):
            name = urllib.parse.unquote(self._owner.partition(" ")[2])
            return f"the server takes weights from learner {name!r}; see {TAKE_OVER} in the docs"
        if path in _STEPS and self._expired:
            return (
                f"{LAPSED}: it made no request for {self._seconds:g} s ({SECONDS}), so the server "
                "ended it; publish again"
            )
        if path in _STEPS and self._publish != _header(scope, PUBLISH):
            return f"{LAPSED}: another one has begun since; publish again"
        if path in (_START, _UPDATE) and _WEIGHTS in self._asleep:
            return (
                "the server sleeps, and only a learner with sampler.sleep = true wakes it; set it, "
                "or restart the server"
            )
        return ""

    def _lacks_weights(self, path: str, scope: Message) -> bool:
        """Tells whether a request would have a sleeping server sample without its weights."""
        if path == _RESUME:
            return bool(self._asleep)
        wakes = path == _WAKE and scope["query_string"] != _WEIGHTS
        return wakes and bool(self._asleep) and self._unnamed

    async def _step(self, path: str, scope: Message, receive: Receive, send: Send) -> None:
        """Passes on a request of a publish; its lease starts anew with the response."""
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            await self._task  # otherwise the server would resume after this pause
        self._open, self._expired = True, False
        if path in _BEGIN:
            self._publish = _header(scope, PUBLISH)
        before = self._unnamed
        if path in (_UPDATE, _SLEEP):
            self._loaded, self._unnamed = False, True
        if path == _SLEEP:
            self._asleep, self._paused = {_WEIGHTS, _CACHE}, True
        self._busy += 1
        own = dict(scope)  # the application changes it
        status, text = 0, ""
        try:
            if path == _SLEEP:
                status = await self._hold(scope, receive, send)
            elif path == _WAKE and not self._asleep:
                status = 200
                await respond(send, status, {"status": "awake"})
            else:
                status, text = await self._pass(scope, receive, send)
        except Exception as error:
            text = str(error)
            raise
        finally:
            self._busy -= 1
            if path == _UPDATE:
                self._loaded = status == 200
                found = marker(text)
                # Either way no weight was touched.
                refused = found == REFUSED or (found is None and 400 <= status < 500)
                self._unnamed = before if refused else True
            if path == _FINISH and status == 200 and self._loaded:
                self._loaded = self._unnamed = False
            if path == _WAKE and status == 200:
                self._asleep -= {own["query_string"]}
            if path in (_PAUSE, _RESUME) and status == 200:
                self._paused = path == _PAUSE
            if path == _RESUME and status == 200:
                self._open = False
                if not self._unnamed:
                    self._fault = ""
            if self._open and not self._busy:
                if self._timer is not None:  # the learner's connection has closed late
                    self._timer.cancel()
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(self._seconds, self._expire, own)

    def _expire(self, scope: Message) -> None:
        self._open, self._expired = False, True
        silence = f"the learner was silent for {self._seconds:g} s in the middle of a publish"
        if self._unnamed:
            state = "is paused and has" if self._paused else "samples from"
            state = "sleeps and has" if self._asleep else state
            self._fault = (
                f"{silence}: the server {state} the weights of no version; the next complete "
                "publish repairs it"
            )
            _log.error("%s", self._fault)
        else:
            _log.warning("%s; resuming, because no weight has changed", silence)
            # Held here, or the garbage collector may take it.
            self._task = asyncio.ensure_future(self._resume(scope))

    async def _resume(self, scope: Message) -> None:
        try:
            if self._asleep:  # its cache, after all weights have come
                status, _ = await self._ask(scope, _WAKE, _CACHE)
            else:
                status, _ = await self._ask(scope, _RESUME)
            if status == 200:
                self._asleep = set()
            else:
                self._fault = "the server is paused and does not resume; restart it"
        except Exception as error:
            self._fault = f"the server is paused and does not resume ({error!r}); restart it"

    async def _hold(self, scope: Message, receive: Receive, send: Send) -> int:
        """Sends the server to sleep; returns its status, after the learner has closed the
        connection if that is 200."""
        status, text = await self._ask(scope, _SLEEP, scope["query_string"])
        if status != 200:
            await respond(send, status, {"error": text})
            return status
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"asleep", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        return status

    async def _ask(self, scope: Message, path: str, query: bytes = b"") -> tuple[int, str]:
        """Makes a request in the place of another; returns as `_pass`."""
        changes: dict[str, Any] = {"method": "POST", "path": path, "headers": []}
        changes |= {"raw_path": path.encode(), "query_string": query}

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            pass

        return await self._pass({**scope, **changes}, receive, send)

    async def _pass(self, scope: Message, receive: Receive, send: Send) -> tuple[int, str]:
        """Passes a request on; returns its status and the beginning of its text."""
        status, body = 0, b""

        async def watch(message: Message) -> None:
            nonlocal status, body
            status = message.get("status", status)
            body += message.get("body", b"")[: _KEPT - len(body)]
            await send(message)

        await self._app(scope, receive, watch)
        return status, body.decode(errors="replace")


def _by_hand(path: str, scope: Message) -> bool:
    """Tells whether a person sends the server to sleep or wakes it, not a publish."""
    return path in (_SLEEP, _WAKE) and _header(scope, PUBLISH) is None


def _sender(scope: Message) -> str | None:
    return _header(scope, HEADER)


def _header(scope: Message, name: str) -> str | None:
    values = header_values(scope, name.lower().encode())
    return values[0].decode("latin-1") if len(values) == 1 else None
