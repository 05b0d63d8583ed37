"""Hosts of servers: an agent, and recorders in place of vLLM that read its payloads."""

import abc
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from jaxrl.bridge.base import BehindError, UnavailableError
from jaxrl.bridge.in_vllm import relay
from jaxrl.bridge.store.agent import StoreAgent
from tests.bridge.cases import Recorder


class HostedRecorder(Recorder, abc.ABC):
    """A `Recorder` on a host with an agent."""

    def __init__(self, payloads: Path, *, port: int = 8000) -> None:
        super().__init__()
        self.payloads, self.port = payloads, port
        self.url = f"http://a-host:{port}"
        self.whole = 0  # times that the agent lacked a base

    def connect(self, *, root: str, **announced: Any) -> None:
        assert root == ""
        super().connect(root=str(self.payloads), **announced)

    def fetch(self, request: dict[str, Any]) -> Path | None:
        if self.failure is not None:
            raise self.failure
        status, body = self.ask(json.dumps({**request, "learner": self.learner._asdict()}))
        if status != 200:
            raise UnavailableError(body["error"])
        if "behind" in body:
            raise BehindError(body["behind"])
        self.whole += body["directory"] is None
        return None if body["directory"] is None else Path(body["directory"])

    @abc.abstractmethod
    def ask(self, text: str) -> tuple[int, Any]:
        """Returns status and body of the answer to a request."""


class DirectRecorder(HostedRecorder):
    """Its agent lies in this process."""

    def __init__(self, agent: StoreAgent, payloads: Path, *, port: int = 8000) -> None:
        super().__init__(payloads, port=port)
        self.agent = agent

    def ask(self, text: str) -> tuple[int, Any]:
        answer = self.agent.answer({**json.loads(text), "server": str(self.port)})
        return answer["status"], answer["body"]


class RelayedRecorder(HostedRecorder):
    """Its agent is a process, which a server's relay asks."""

    def __init__(self, directory: Path, *, port: int = 8000) -> None:
        super().__init__(directory / relay.PAYLOADS, port=port)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(relay.DIRECTORY, str(directory))
            self._relay = relay.Relay(_absent)

    def ask(self, text: str) -> tuple[int, Any]:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": text.encode()}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "path": relay.PATH, "server": ("127.0.0.1", self.port)}
        asyncio.run(self._relay(scope, receive, send))
        return sent[0]["status"], json.loads(sent[1]["body"])


async def _absent(*_: Any) -> None:
    raise AssertionError("the request was not for the agent")


def host(directory: Path, *, key: str | None = None, servers: int = 1) -> list[DirectRecorder]:
    """Makes a host with an agent and some servers."""
    directory.mkdir(exist_ok=True)
    agent = StoreAgent(directory, key=key)
    return [DirectRecorder(agent, directory, port=8000 + i) for i in range(servers)]
