"""The control side of a running vLLM server, over HTTP."""

import http.client
import json
import time
import urllib.parse
from typing import Any

from jaxrl.bridge.base import (
    POISONED,
    REFUSED,
    InFlight,
    PoisonedError,
    RefusedError,
    Timings,
)


class ControlError(RuntimeError):
    """The server did not do what it was told; the message has its own words."""


class VllmServer:
    """A `Server` that was started with VLLM_SERVER_DEV_MODE=1 and our weight-transfer backend."""

    def __init__(self, url: str, *, timeout: float = 600.0) -> None:
        """Does not connect yet.

        Args:
          url: such as http://127.0.0.1:8000.
          timeout: seconds that any one operation may take. vLLM can hang for ever, /health too.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not the http:// address of a server")
        self._host, self._port = parts.hostname, parts.port or 80
        self._timeout = timeout

    def connect(self, *, root: str, wire: str, sampler: str) -> None:
        """See `Server.connect`."""
        info = {"root": root, "wire": wire, "sampler": sampler}
        try:
            self._call("POST", "/init_weight_transfer_engine", {"init_info": info})
        except ControlError as error:
            if REFUSED in str(error):
                raise RefusedError(_reason(error, REFUSED)) from None
            raise

    def update(self, payload: str, *, version: int, in_flight: InFlight) -> Timings:
        """See `Server.update`. Whatever is not clearly a refusal counts as poisoned."""
        start = time.perf_counter()
        # The cache holds keys and values of the old weights; requests in flight compute them anew.
        self._call("POST", f"/pause?mode={in_flight}&clear_cache=true")
        paused = time.perf_counter()
        refused = self._load(payload, version)
        loaded = time.perf_counter()
        self._call("POST", "/resume")
        resumed = time.perf_counter()
        if refused is not None:
            raise refused
        return Timings(pause=paused - start, load=loaded - paused, resume=resumed - loaded)

    def weight_version(self) -> str:
        """What the server says it samples from; "default" before the first publish."""
        return self._call("GET", "/weight_info")["weight_version"]

    def _load(self, payload: str, version: int) -> RefusedError | None:
        info = {"payload": payload, "version": version}
        try:
            self._call("POST", "/start_weight_update")
            self._call("POST", "/update_weights", {"update_info": info})
            self._call("POST", "/finish_weight_update", {"weight_version": str(version)})
        except ControlError as error:
            if REFUSED in str(error):
                return RefusedError(_reason(error, REFUSED))
            reason = _reason(error, POISONED)
            raise PoisonedError(f"{self._host}:{self._port} stays paused: {reason}") from error
        return None

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        where = f"{method} http://{self._host}:{self._port}{path}"
        try:
            content = None if body is None else json.dumps(body)
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise ControlError(f"{where}: {error!r}") from None
        finally:
            connection.close()
        if response.status != 200:
            raise ControlError(f"{where}: {response.status} {text}")
        return json.loads(text) if text else None


def _reason(error: Exception, marker: str) -> str:
    """The engine's message within the server's."""
    text = str(error)
    return text[text.find(marker) :] if marker in text else text
