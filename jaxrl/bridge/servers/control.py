"""Client of a vLLM server's control routes, over HTTP."""

import contextlib
import itertools
import secrets
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

import httpx2

from jaxrl.bridge.base import (
    LAPSED,
    NOT_CONNECTED,
    POISONED,
    REFUSED,
    UNFINISHED,
    BehindError,
    InFlight,
    LearnerIdentity,
    PoisonedError,
    RefusedError,
    Timings,
    UnavailableError,
    marker,
)
from jaxrl.bridge.in_vllm import auth, lease, relay
from jaxrl.bridge.servers import answers, facts
from jaxrl.bridge.servers.connection import limits, make_client

_PROBE_TIMEOUT = 5.0  # seconds for a failed server's answer
_REST = 10  # times as long as it let a probe wait, a failed server is not probed again
_VERSION = "/weight_info"
_INFO = "/server_info?config_format=json"
_NO_ROUTE = f"{_VERSION}: 404 "
_TRIED = ("0.32.0",)  # versions of vLLM that the tests run


class ControlError(RuntimeError):
    """A control request failed; the message quotes the server."""


class _ServerFaultError(ControlError):
    """The server failed (status 500 or above), for instance its engine."""


class _UnreachableError(_ServerFaultError):
    """The server did not answer."""


class VllmServer:
    """A server that was started with VLLM_SERVER_DEV_MODE=1 and jaxrl's weight-transfer backend.

    Attributes:
      url: address of the server.
      connected: True if its last operation succeeded; otherwise `update` connects it again.
      last_error: message of its last failure.
      version: the version of its vLLM; "" before it is connected.
      shared: True if it may have adapters of several learners.
    """

    shared = False
    _advice = "to take adapters of rank N, start the server with jaxrl serve --max_lora_rank N"

    def __init__(self, url: str, *, timeout: float = 600.0, api_key: str | None = None) -> None:
        """Makes the client without connecting; raises ValueError unless `url` begins with http://.

        The timeout is in seconds per operation: vLLM can hang forever, even in /health.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not the http:// address of a server")
        self.url, self.connected, self.last_error, self.version = url, False, "", ""
        self._client = make_client(f"http://{parts.netloc}", headers=auth.headers(api_key))
        self._timeout = timeout
        self._init_info: dict[str, Any] = {}
        self._learner: dict[str, str] = {}
        self._admitted = False  # by the server, which then admits no other learner
        self._rests = 0.0  # until this time
        self._publishing = False  # or a publish ended halfway; it may be paused

    def connect(
        self, *, root: str, wire: str, sampler: str, logits: str, learner: LearnerIdentity
    ) -> None:
        """Announces a learner, the directory of its payloads and the dtypes.

        A server that does not answer is connected at the next update. Raises RefusedError if the
        server takes weights from a learner that this one does not replace, computes in another
        dtype than `sampler`, its head in another one than `logits`, or does not find `root`.
        """
        self._learner = learner._asdict()
        self._client.headers.update(lease.header(learner))
        self._init_info = dict(
            root=root, wire=wire, sampler=sampler, logits=logits, learner=self._learner
        )
        with contextlib.suppress(_ServerFaultError):
            self._connect()

    def disconnect(self) -> None:
        """Lets other learners connect; does nothing if the server does not answer."""
        with contextlib.suppress(ControlError, RefusedError):
            if self._admitted:
                self._call("POST", "/shutdown_weight_transfer_engine", timeout=_PROBE_TIMEOUT)
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

    def is_stock(self) -> bool | None:
        """Tells whether the server has no routes for weights; None if it does not answer."""
        try:
            self._call("GET", _VERSION, timeout=_PROBE_TIMEOUT)
        except _UnreachableError:
            return None
        except ControlError as error:
            return _NO_ROUTE in str(error)
        return False

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

    def update(self, payload: str, *, version: int, in_flight: InFlight) -> Timings:
        """Pauses, loads the directory `payload` below the root, sets the version and resumes.

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
            marks = [time.perf_counter()]
            self._client.headers[lease.PUBLISH] = secrets.token_hex(8)
            self._publishing = True
            # The KV cache belongs to the old weights; vLLM recomputes it for requests in flight.
            self._call("POST", f"/pause?mode={in_flight}&clear_cache=true")
            marks.append(time.perf_counter())
            self._start()
            refusal = self._load({"payload": payload, "version": version, "learner": self._learner})
            marks.append(time.perf_counter())
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
                found = self._probe(_VERSION)["weight_version"]
        self.connected = found == self._label(label) and not self._publishing
        return self.connected

    def load_adapter(self, name: str, directory: PurePath) -> None:
        """Loads an adapter in PEFT's format; raises RefusedError if the server refuses it, and
        UnavailableError if the server does not answer."""
        adapter = {"lora_name": name, "lora_path": str(directory)}
        with self._tracked():
            try:
                self._call("POST", "/v1/load_lora_adapter", adapter)
            except _UnreachableError:
                raise
            except ControlError as error:
                raise RefusedError(f"{error}; {self._advice}") from None

    def unload_adapter(self, name: str) -> None:
        """Unloads the adapter; does nothing if the server does not know it or does not answer."""
        adapter = {"lora_name": name}
        with contextlib.suppress(ControlError, RefusedError):
            if self.connected:
                self._call("POST", "/v1/unload_lora_adapter", adapter, timeout=_PROBE_TIMEOUT)

    def weight_version(self) -> str:
        """Returns the version and the learner's session that the server reports, separated by "@",
        or "default" before the first publish."""
        return self._call("GET", _VERSION)["weight_version"]

    def dtypes(self) -> tuple[str, str]:
        """Returns the dtypes that the server and its head compute in, such as "bfloat16" and
        "float32". Takes 15 seconds, because the server also lists its whole environment."""
        info = self._call("GET", _INFO)["vllm_config"]["model_config"]
        dtype = info["dtype"].removeprefix("torch.")
        head = (info["hf_overrides"] or {}).get("head_dtype", "model")
        return dtype, dtype if head == "model" else head

    def facts(self) -> dict[str, str]:
        """Returns vLLM's version and the settings that its arithmetic depends on, by name. Takes as
        long as `dtypes`; a server without jaxrl's engine tells its version alone."""
        self._read_version()
        found = {"vLLM": self.version or "unknown"}
        with contextlib.suppress(ControlError):
            found |= facts.of_server(self._call("GET", _INFO))
        return found

    def max_model_len(self) -> int:
        """Returns the longest sequence that the server takes, in tokens."""
        return self.models()[0]["max_model_len"]

    def models(self, *, quickly: bool = False) -> list[dict[str, Any]]:
        """Lists the base model and the adapters as vLLM does: an adapter names its `parent`."""
        return self._call("GET", "/v1/models", timeout=_PROBE_TIMEOUT if quickly else None)["data"]

    def adapter_names(self, prefix: str) -> list[str]:
        """Lists the loaded adapters whose names begin with a prefix; raises UnavailableError if the
        server does not answer."""
        with self._tracked():
            return [one["id"] for one in self.models() if one["id"].startswith(prefix)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids, by the server's tokenizer."""
        return self._call("POST", "/detokenize", {"tokens": list(tokens)})["prompt"]

    def classifies(self) -> bool:
        """Tells whether the server's model gives scores, not tokens."""
        try:
            self.scores([[0]])
        except _ServerFaultError:
            raise
        except ControlError:
            return False
        return True

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Returns the score of each sequence of token ids by a classifier with one label, before
        any activation."""
        body = {"input": [list(ids) for ids in sequences], "use_activation": False}
        answer = self._call("POST", "/classify", body)["data"]
        if any(one["num_classes"] != 1 for one in answer):
            raise ControlError(f"{self.url}: its model has several labels; one is expected")
        return [one["probs"][0] for one in sorted(answer, key=lambda one: one["index"])]

    def try_request(self, *, timeout: float) -> None:
        """Requests one token; raises ControlError if the server does not complete it."""
        params = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "detokenize": False}
        body = {"token_ids": [0], "sampling_params": params}
        answer = self._call("POST", "/inference/v1/generate", body, timeout=timeout)
        if not answer["choices"][0]["token_ids"]:
            raise ControlError(f"{self.url} completed a request with no token: {answer}")

    def healthy(self) -> bool:
        """Tells whether the server answers that it is ready."""
        try:
            self._call("GET", "/health")
        except ControlError:
            return False
        return True

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

    def _read_version(self) -> None:
        with contextlib.suppress(ControlError):
            self.version = str((self._call("GET", "/version") or {}).get("version", ""))

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
        except _ServerFaultError as error:
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
            return self._call("GET", path, timeout=_PROBE_TIMEOUT)
        except _UnreachableError:
            now = time.monotonic()
            self._rests = now + _REST * (now - start)
            raise

    def _label(self, version: str) -> str:
        """Returns the server's name for a version of this learner; other learners' names differ."""
        return f"{version}@{self._learner.get('session', '')}"

    def _start(self) -> None:
        """Opens vLLM's session of an update. An error leaves the server paused with its old weights
        until its lease expires."""
        try:
            self._call("POST", "/start_weight_update")
        except _UnreachableError:
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
        except _UnreachableError:
            raise
        except ControlError as error:
            if not isinstance(error, _ServerFaultError) and path == "/update_weights":
                raise RefusedError(str(error)) from error  # rejected before it reached the engine
            raise PoisonedError(
                f"stays paused: {answers.starting_at(POISONED, str(error))}"
            ) from error

    def _call(
        self, method: str, path: str, body: Any = None, *, timeout: float | None = None
    ) -> Any:
        where, timeout = f"{method} {self.url}{path}", timeout or self._timeout
        try:
            response = self._client.request(method, path, json=body, timeout=limits(timeout))
        except httpx2.RequestError as error:
            raise _UnreachableError(f"{where}: {error!r}") from None
        if response.status_code != 200:
            if marker(response.text) == REFUSED:
                raise RefusedError(answers.starting_at(REFUSED, answers.message(response.text)))
            kind = ControlError if response.status_code < 500 else _ServerFaultError
            raise kind(f"{where}: {response.status_code} {response.text}")
        is_json = response.headers.get("Content-Type", "").startswith("application/json")
        return response.json() if response.content and is_json else None
