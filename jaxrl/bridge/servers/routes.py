"""Questions to a vLLM server, over HTTP."""

import contextlib
import urllib.parse
from collections.abc import Sequence
from typing import Any

import httpx2

from jaxrl.bridge.base import INT8, REFUSED, RefusedError, marker
from jaxrl.bridge.in_vllm import auth
from jaxrl.bridge.servers import answers, facts
from jaxrl.bridge.servers.connection import limits, make_client

PROBE_TIMEOUT = 5.0  # seconds for a failed server's answer
VERSION = "/weight_info"
_INFO = "/server_info?config_format=json"
_NO_ROUTE = f"{VERSION}: 404 "


class ControlError(RuntimeError):
    """A control request failed; the message quotes the server."""


class ServerFaultError(ControlError):
    """The server failed (status 500 or above), for instance its engine."""


class UnreachableError(ServerFaultError):
    """The server did not answer."""


class ServerRoutes:
    """Any vLLM server, of which nothing is changed.

    Attributes:
      url: address of the server.
      version: the version of its vLLM; "" before it has told it.
    """

    def __init__(self, url: str, *, timeout: float = 600.0, api_key: str | None = None) -> None:
        """Makes the client without connecting; raises ValueError unless `url` begins with http://.

        The timeout is in seconds per operation: vLLM can hang forever, even in /health.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not the http:// address of a server")
        self.url, self.version = url, ""
        self._client = make_client(f"http://{parts.netloc}", headers=auth.headers(api_key))
        self._timeout = timeout

    def is_stock(self) -> bool | None:
        """Tells whether the server has no routes for weights; None if it does not answer."""
        try:
            self._call("GET", VERSION, timeout=PROBE_TIMEOUT)
        except UnreachableError:
            return None
        except ControlError as error:
            return _NO_ROUTE in str(error)
        return False

    def weight_version(self) -> str:
        """Returns the version and the learner's session that the server reports, separated by "@",
        or "default" before the first publish."""
        return self._call("GET", VERSION)["weight_version"]

    def arithmetic(self) -> tuple[str, str, str]:
        """Returns the dtypes that the server and its head compute in, such as "bfloat16" and
        "float32", and the form of its operands, "none" or "int8". Takes 15 seconds, because the
        server also lists its whole environment."""
        info = self._call("GET", _INFO)["vllm_config"]["model_config"]
        dtype = info["dtype"].removeprefix("torch.")
        head = (info["hf_overrides"] or {}).get("head_dtype", "model")
        blocks = "int8" if info.get("quantization") == INT8 else "none"
        return dtype, dtype if head == "model" else head, blocks

    def facts(self) -> dict[str, str]:
        """Returns vLLM's version and the settings that its arithmetic depends on, by name. Takes as
        long as `arithmetic`; a server without jaxrl's engine tells its version alone."""
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
        return self._call("GET", "/v1/models", timeout=PROBE_TIMEOUT if quickly else None)["data"]

    def logprob_gaps(
        self, prompts: Sequence[Sequence[int]], *, model: str, tokens: int, n: int
    ) -> list[float]:
        """Samples `n` completions of each prompt from a model of `models`. Returns for each token
        the gap between its log-prob and that of the most probable token, in nats: a difference of
        two logits of one position."""
        asked = {"model": model, "n": n, "max_tokens": tokens, "temperature": 1.0}
        gaps = list[float]()
        for prompt in prompts:
            body = asked | {"prompt": list(prompt), "logprobs": 1, "ignore_eos": True}
            for choice in self._call("POST", "/v1/completions", body)["choices"]:
                found = choice["logprobs"]
                pairs = zip(found["top_logprobs"], found["token_logprobs"], strict=True)
                gaps += [max(top.values()) - drawn for top, drawn in pairs]
        return gaps

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids, by the server's tokenizer."""
        return self._call("POST", "/detokenize", {"tokens": list(tokens)})["prompt"]

    def classifies(self) -> bool:
        """Tells whether the server's model gives scores, not tokens."""
        try:
            self.scores([[0]])
        except ServerFaultError:
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

    def _read_version(self) -> None:
        with contextlib.suppress(ControlError):
            self.version = str((self._call("GET", "/version") or {}).get("version", ""))

    def _call(
        self, method: str, path: str, body: Any = None, *, timeout: float | None = None
    ) -> Any:
        response = self._send(method, path, body, timeout=timeout)
        is_json = response.headers.get("Content-Type", "").startswith("application/json")
        return response.json() if response.content and is_json else None

    def _send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout: float | None = None,
        stream: bool = False,
    ) -> httpx2.Response:
        """Makes a request; a `stream` is left open after the head of the answer."""
        where, allowed = f"{method} {self.url}{path}", limits(timeout or self._timeout)
        try:
            request = self._client.build_request(method, path, json=body, timeout=allowed)
            response = self._client.send(request, stream=stream)
            if response.status_code != 200:
                response.read()
        except httpx2.RequestError as error:
            raise UnreachableError(f"{where}: {error!r}") from None
        if response.status_code != 200:
            if marker(response.text) == REFUSED:
                raise RefusedError(answers.starting_at(REFUSED, answers.message(response.text)))
            kind = ControlError if response.status_code < 500 else ServerFaultError
            raise kind(f"{where}: {response.status_code} {response.text}")
        return response
