"""The control side of a running vLLM server, over HTTP."""

import contextlib
import itertools
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

from jaxrl.bridge.base import (
    POISONED,
    REFUSED,
    STRANGER,
    InFlight,
    LostError,
    PoisonedError,
    RefusedError,
    Timings,
)
from jaxrl.bridge.in_vllm import auth

_PROBE = 5.0  # seconds that a server which was lost has to answer


class ControlError(RuntimeError):
    """The server did not do what it was told; the message has its own words."""


class _UnwellError(ControlError):
    """Something in the server failed, such as its engine."""


class _UnreachableError(_UnwellError):
    """There was no answer."""


class VllmServer:
    """A `Server` that was started with VLLM_SERVER_DEV_MODE=1 and our weight-transfer backend.

    Attributes:
      url: its address.
      connected: whether it did what it was told last; one that did not is met again by `update`.
      trouble: what was wrong with it last.
    """

    def __init__(self, url: str, *, timeout: float = 600.0, api_key: str | None = None) -> None:
        """Does not connect yet.

        Args:
          url: such as http://127.0.0.1:8000.
          timeout: seconds that any one operation may take. vLLM can hang for ever, /health too.
          api_key: what the server was started with.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not the http:// address of a server")
        self.url, self.connected, self.trouble = url, False, ""
        self._client = httpx2.Client(
            base_url=f"http://{parts.netloc}",
            headers=auth.headers(api_key),
            limits=httpx2.Limits(max_keepalive_connections=0),
            trust_env=False,  # no proxy stands between a run and its servers
        )
        self._timeout = timeout
        self._init_info: dict[str, str] = {}

    def connect(self, *, root: str, wire: str, sampler: str) -> None:
        """See `Server.connect`."""
        self._init_info = {"root": root, "wire": wire, "sampler": sampler}
        with contextlib.suppress(_UnwellError):
            self._meet()

    def update(self, payload: str, *, version: int, in_flight: InFlight) -> Timings:
        """See `Server.update`. Of a server that was paused and answers, whatever is not clearly a
        refusal counts as poisoned."""
        with self._watched():
            if not self.connected:
                self._call("GET", "/health", timeout=_PROBE)
                self._meet()
            marks = [time.perf_counter()]
            # The cache holds keys and values of the old weights; requests in flight get new ones.
            self._call("POST", f"/pause?mode={in_flight}&clear_cache=true")
            marks.append(time.perf_counter())
            refusal = self._load(payload, version)
            marks.append(time.perf_counter())
            self._while_paused("/resume")
            marks.append(time.perf_counter())
            if refusal is not None and STRANGER not in str(refusal):
                raise refusal
        if refusal is not None:  # it was started again meanwhile
            self.connected = False
            return self.update(payload, version=version, in_flight=in_flight)
        pause, load, resume = (after - before for before, after in itertools.pairwise(marks))
        return Timings(pause=pause, load=load, resume=resume)

    def holds(self, label: str) -> bool:
        """See `AdapterServer.holds`."""
        with self._watched():
            timeout = None if self.connected else _PROBE
            found = self._call("GET", "/weight_info", timeout=timeout)["weight_version"]
        self.connected = found == label
        return self.connected

    def load_adapter(self, name: str, directory: Path) -> None:
        """See `AdapterServer.load_adapter`. vLLM reads and checks an adapter whole before it puts
        it in the place of another."""
        with self._watched():
            try:
                self._call(
                    "POST",
                    "/v1/load_lora_adapter",
                    {"lora_name": name, "lora_path": str(directory)},
                )
            except _UnreachableError:
                raise
            except ControlError as error:
                raise RefusedError(
                    f"{error}; a server takes adapters if it was started for their rank: jaxrl "
                    "serve --max_lora_rank N"
                ) from None

    def forget_adapter(self, name: str) -> None:
        """See `AdapterServer.forget_adapter`."""
        with contextlib.suppress(ControlError):
            if self.connected:
                self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, timeout=_PROBE)

    def weight_version(self) -> str:
        """What the server says it samples from; "default" before the first publish."""
        return self._call("GET", "/weight_info")["weight_version"]

    def dtype(self) -> str:
        """What the server computes in, such as "bfloat16". Takes a server 15 seconds: it lists its
        whole environment, too."""
        info = self._call("GET", "/server_info?config_format=json")
        return info["vllm_config"]["model_config"]["dtype"].removeprefix("torch.")

    def healthy(self) -> bool:
        """Whether the server answers that it is ready."""
        try:
            self._call("GET", "/health")
        except ControlError:
            return False
        return True

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Whoever does not do what it is told is not connected any more.

        Raises:
          LostError: for what else is wrong than a refusal or a load that failed halfway.
        """
        try:
            yield
        except (ControlError, RefusedError, PoisonedError) as error:
            self.connected, self.trouble = False, str(error)
            if isinstance(error, ControlError):
                raise LostError(str(error)) from error
            raise

    def _meet(self) -> None:
        self.connected = False
        try:
            self._call("POST", "/init_weight_transfer_engine", {"init_info": self._init_info})
        except ControlError as error:
            if REFUSED in str(error):
                raise RefusedError(_reason(error, REFUSED)) from None
            raise
        self.connected = True

    def _load(self, payload: str, version: int) -> RefusedError | None:
        info = {"payload": payload, "version": version}
        try:
            self._while_paused("/start_weight_update")
            self._while_paused("/update_weights", {"update_info": info})
            self._while_paused("/finish_weight_update", {"weight_version": str(version)})
        except RefusedError as error:
            return error
        return None

    def _while_paused(self, path: str, body: Any = None) -> None:
        """Of what fails here it is not known where it has left the server."""
        try:
            self._call("POST", path, body)
        except _UnreachableError:
            raise
        except ControlError as error:
            if REFUSED in str(error):
                raise RefusedError(_reason(error, REFUSED)) from None
            raise PoisonedError(f"stays paused: {_reason(error, POISONED)}") from error

    def _call(
        self, method: str, path: str, body: Any = None, *, timeout: float | None = None
    ) -> Any:
        where = f"{method} {self.url}{path}"
        try:
            response = self._client.request(
                method, path, json=body, timeout=timeout or self._timeout
            )
        except httpx2.RequestError as error:
            raise _UnreachableError(f"{where}: {error!r}") from None
        if response.status_code != 200:
            kind = ControlError if response.status_code < 500 else _UnwellError
            raise kind(f"{where}: {response.status_code} {response.text}")
        is_json = response.headers.get("Content-Type", "").startswith("application/json")
        return response.json() if response.content and is_json else None


def _reason(error: Exception, marker: str) -> str:
    """The engine's message within the server's."""
    text = str(error)
    return text[text.find(marker) :] if marker in text else text
