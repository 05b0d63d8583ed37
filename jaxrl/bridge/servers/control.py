"""Client of a vLLM server's control routes, over HTTP."""

import contextlib
import itertools
import secrets
import time
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import httpx2

from jaxrl.bridge.base import (
    LAPSED,
    NOT_CONNECTED,
    POISONED,
    UNFINISHED,
    BehindError,
    InFlight,
    LearnerIdentity,
    PoisonedError,
    RefusedError,
    Timings,
    UnavailableError,
)
from jaxrl.bridge.in_vllm import lease, relay
from jaxrl.bridge.servers import answers
from jaxrl.bridge.servers.routes import (
    PROBE_TIMEOUT,
    VERSION,
    ControlError,
    ServerFaultError,
    ServerRoutes,
    UnreachableError,
)

_REST = 10  # times as long as it let a probe wait, a failed server is not probed again
_TRIED = ("0.32.0",)  # versions of vLLM that the tests run


class VllmServer(ServerRoutes):
    """A server that was started with VLLM_SERVER_DEV_MODE=1 and jaxrl's weight-transfer backend.

    Attributes:
      connected: True if its last operation succeeded; otherwise `update` connects it again.
      last_error: message of its last failure.
      shared: True if it may have adapters of several learners.
    """

    shared = False
    _advice = "to take adapters of rank N, start the server with jaxrl serve --max_lora_rank N"

    def __init__(
        self, url: str, *, timeout: float = 600.0, api_key: str | None = None, sleeps: bool = False
    ) -> None:
        """Makes the client without connecting; `sleeps` tells that `sleep` will be called.

        The other arguments and the error are those of `ServerRoutes`.
        """
        super().__init__(url, timeout=timeout, api_key=api_key)
        self.connected, self.last_error = False, ""
        self._sleeps = sleeps
        self._held: httpx2.Response | None = None  # open while the server sleeps
        self._falling = 0.0  # seconds that it took to fall asleep
        self._init_info: dict[str, Any] = {}
        self._learner: dict[str, str] = {}
        self._admitted = False  # by the server, which then admits no other learner
        self._rests = 0.0  # until this time
        self._publishing = False  # or a publish ended halfway; it may be paused

    def connect(
        self,
        *,
        root: str,
        wire: str,
        sampler: str,
        logits: str,
        learner: LearnerIdentity,
        blocks: str = "none",
    ) -> None:
        """Announces a learner, the directory of its payloads and the dtypes.

        A server that does not answer is connected at the next update. Raises RefusedError if the
        server takes weights from a learner that this one does not replace, computes in another
        dtype than `sampler`, its head in another one than `logits`, or in another form than
        `blocks`, does not find `root`, or keeps its memory when it sleeps.
        """
        self._learner = learner._asdict()
        self._client.headers.update(lease.header(learner))
        self._init_info = dict(
            root=root,
            wire=wire,
            sampler=sampler,
            logits=logits,
            blocks=blocks,
            learner=self._learner,
            sleeps=self._sleeps,
        )
        with contextlib.suppress(ServerFaultError):
            self._connect()

    def disconnect(self) -> None:
        """Lets other learners connect; does nothing if the server does not answer."""
        self._let_go()
        with contextlib.suppress(ControlError, RefusedError):
            if self._admitted:
                self._call("POST", "/shutdown_weight_transfer_engine", timeout=PROBE_TIMEOUT)
        self.connected = self._admitted = False

    @property
    def untried(self) -> str | None:
        """A warning if the tests do not run the server's version of vLLM, else None."""
        if self.version.partition("+")[0] in ("", *_TRIED):
            return None
        return (
            f"{self.url} runs vLLM {self.version}, which jaxrl is not tested with (tested: "
            f"{', '.join(_TRIED)}); continuing"
        )

    def fail(self, error: Exception) -> None:
        """Records that the server missed a version: it counts as not connected, so that nothing is
        sampled from it before `update` has connected it again."""
        self.connected, self.last_error = False, str(error)

    def fetch(self, request: dict[str, Any]) -> PurePath | None:
        """Returns the directory of a version on the server's host, once the agent there has fetched
        it while the server samples; None if the agent needs the version whole.

        Raises:
          RefusedError: the server belongs to another learner, or its host has no agent.
          BehindError: the store does not answer the host.
          UnavailableError: the server or its agent does not answer.
        """
        with self._tracked():
            self._reconnect()
            found = self._call("POST", relay.PATH, request | {"learner": self._learner})
        if why := found.get("behind"):
            raise BehindError(why)
        return PurePath(found["directory"]) if found["directory"] else None

    def sleep(self, *, in_flight: InFlight) -> None:
        """Makes the server drop its weights and its KV cache until the next `update`. Should this
        process die before, the server notices that the connection closes.

        Raises:
          RefusedError: the server takes weights from another learner.
          UnavailableError: the server does not answer.
        """
        with self._tracked():
            start = time.perf_counter()
            self._begin()
            self._held = self._send("POST", f"/sleep?level=2&mode={in_flight}", stream=True)
            self._falling = time.perf_counter() - start

    def update(self, payload: str, *, version: int, in_flight: InFlight) -> Timings:
        """Pauses the server or wakes it, loads the directory `payload` below the root, sets the
        version and resumes.

        It begins again if the server has restarted, or has ended the publish while this process was
        suspended.

        Raises:
          RefusedError: the old weights keep serving.
          PoisonedError: any other error while the server is paused; it stays paused.
          UnavailableError: the server does not answer.
        """
        try:
            return self._update(payload, version=version, in_flight=in_flight)
        except RefusedError as error:
            if not any(reason in str(error) for reason in (NOT_CONNECTED, LAPSED)):
                raise
        return self._update(payload, version=version, in_flight=in_flight)

    def _update(self, payload: str, *, version: int, in_flight: InFlight) -> Timings:
        with self._tracked():
            self._reconnect()
            marks = [time.perf_counter() - self._falling]
            if not self._let_go():  # otherwise the publish has begun with the sleep
                self._begin()
                # The KV cache belongs to the old weights; vLLM recomputes that of requests in
                # flight.
                self._call("POST", f"/pause?mode={in_flight}&clear_cache=true")
            if self._sleeps:
                self._while_paused("/wake_up?tags=weights")
            marks.append(time.perf_counter())
            self._start()
            refusal = self._load({"payload": payload, "version": version, "learner": self._learner})
            marks.append(time.perf_counter())
            if self._sleeps:
                self._wake_cache(refusal)
            self._while_paused("/resume")
            self._publishing = False
            marks.append(time.perf_counter())
            if refusal is not None:
                raise refusal
        pause, load, resume = (after - before for before, after in itertools.pairwise(marks))
        return Timings(pause=pause, load=load, resume=resume)

    def serves(self, label: str) -> bool:
        """Tells whether the server samples from the weights that this learner published as `label`;
        raises UnavailableError if the server does not answer."""
        with self._tracked():
            if self.connected:
                found = self.weight_version()
            else:
                found = self._probe(VERSION)["weight_version"]
        self.connected = found == self._label(label) and not self._publishing
        return self.connected

    def load_adapter(self, name: str, directory: PurePath) -> None:
        """Loads an adapter in PEFT's format; raises RefusedError if the server refuses it, and
        UnavailableError if the server does not answer."""
        adapter = {"lora_name": name, "lora_path": str(directory)}
        with self._tracked():
            try:
                self._call("POST", "/v1/load_lora_adapter", adapter)
            except UnreachableError:
                raise
            except ControlError as error:
                raise RefusedError(f"{error}; {self._advice}") from None

    def unload_adapter(self, name: str) -> None:
        """Unloads the adapter; does nothing if the server does not know it or does not answer."""
        adapter = {"lora_name": name}
        with contextlib.suppress(ControlError, RefusedError):
            if self.connected:
                self._call("POST", "/v1/unload_lora_adapter", adapter, timeout=PROBE_TIMEOUT)

    def adapter_names(self, prefix: str) -> list[str]:
        """Lists the loaded adapters whose names begin with a prefix; raises UnavailableError if the
        server does not answer."""
        with self._tracked():
            return [one["id"] for one in self.models() if one["id"].startswith(prefix)]

    @contextlib.contextmanager
    def _tracked(self) -> Iterator[None]:
        """Records a failure of the block; the server then counts as not connected. Raises
        ControlError again as UnavailableError."""
        try:
            yield
        except (ControlError, RefusedError, PoisonedError) as error:
            self.fail(error)
            if isinstance(error, ControlError):
                raise UnavailableError(str(error)) from error
            raise

    def _connect(self) -> None:
        self.connected = self._admitted = False
        self._call("POST", "/init_weight_transfer_engine", {"init_info": self._init_info})
        self.connected = self._admitted = True
        self._read_version()

    def _reconnect(self) -> None:
        """Connects a server whose last operation failed.

        Raises:
          ControlError: its health is bad in a way that the next publish does not repair.
          BehindError: as `_probe`.
        """
        if self.connected:
            return
        try:
            self._probe("/health")
        except ServerFaultError as error:
            if UNFINISHED not in str(error):
                raise
        self._connect()

    def _probe(self, path: str) -> Any:
        """Asks a server whose last operation failed. One that does not answer is not asked at every
        publish; then raises BehindError."""
        if time.monotonic() < self._rests:
            raise BehindError(self.last_error)
        start = time.monotonic()
        try:
            return self._call("GET", path, timeout=PROBE_TIMEOUT)
        except UnreachableError:
            now = time.monotonic()
            self._rests = now + _REST * (now - start)
            raise

    def _begin(self) -> None:
        self._client.headers[lease.PUBLISH] = secrets.token_hex(8)
        self._publishing = True

    def _let_go(self) -> bool:
        """Closes the connection of `sleep`; tells whether there was one."""
        held, self._held, self._falling = self._held, None, 0.0
        if held is not None:
            held.close()
        return held is not None

    def _wake_cache(self, refusal: RefusedError | None) -> None:
        try:
            self._while_paused("/wake_up?tags=kv_cache")
        except PoisonedError as error:
            # Asleep, the server has lost its old weights.
            raise error if refusal is None else PoisonedError(f"{error}; {refusal}") from None

    def _label(self, version: str) -> str:
        """Returns the server's name for a version of this learner; other learners' names differ."""
        return f"{version}@{self._learner.get('session', '')}"

    def _start(self) -> None:
        """Opens vLLM's session of an update. An error leaves the server paused with its old weights
        until its lease expires."""
        try:
            self._call("POST", "/start_weight_update")
        except UnreachableError:
            raise
        except ControlError:
            # A killed learner has left its session open. An update without a payload ends it,
            # because vLLM closes the session when an update is refused.
            self._connect()  # refused if the session is another learner's
            with contextlib.suppress(ControlError, RefusedError):
                self._call("POST", "/update_weights", {"update_info": {}})
            self._call("POST", "/start_weight_update")

    def _load(self, info: dict[str, Any]) -> RefusedError | None:
        label = self._label(str(info["version"]))
        try:
            self._while_paused("/update_weights", {"update_info": info})
            self._while_paused("/finish_weight_update", {"weight_version": label})
        except RefusedError as error:
            return error
        return None

    def _while_paused(self, path: str, body: Any = None) -> None:
        """Makes a request whose failure leaves the server in an unknown state."""
        try:
            self._call("POST", path, body)
        except UnreachableError:
            raise
        except ControlError as error:
            if not isinstance(error, ServerFaultError) and path == "/update_weights":
                raise RefusedError(str(error)) from error  # rejected before it reached the engine
            raise PoisonedError(
                f"stays paused: {answers.starting_at(POISONED, str(error))}"
            ) from error
