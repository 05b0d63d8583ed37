"""Way from a server's port to the agent of its host; runs inside vLLM's API server.

A learner reaches the agent through its servers. So the agent needs neither a port nor a key, and a
server's lease refuses requests of other learners.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from jaxrl.bridge.base import REFUSED
from jaxrl.bridge.in_vllm.auth import App, Message, Receive, Send, respond

DIRECTORY = "JAXRL_AGENT"
"""Environment variable of a server: the directory of its host's agent."""
PATH = "/fetch_weights"
"""Route of a request to the agent."""
SOCKET, PAYLOADS = "agent", "payloads"
"""Names in the agent's directory."""

_RESTART = 15.0  # seconds in which a killed agent is back
_ATTEMPTS = 3  # of a request, which may kill the agent
_MAX_BODY = 1 << 20
_DISCONNECT = "/shutdown_weight_transfer_engine"
_NO_AGENT = (
    f"{REFUSED} no agent fetches weights from a store on the server's host; start the server with "
    "jaxrl serve, in an environment with jaxrl[store]"
)


def agent_directory() -> str:
    """Returns the directory of the agent's payloads; raises ValueError if there is no agent."""
    if directory := os.environ.get(DIRECTORY):
        return str(Path(directory, PAYLOADS))
    raise ValueError(_NO_AGENT.removeprefix(REFUSED).strip())


class Relay:
    """ASGI middleware that passes requests for a version to the agent, and tells the agent when the
    server's learner leaves."""

    def __init__(self, app: App) -> None:
        """Reads the agent's directory from the environment."""
        self._app, self._directory = app, os.environ.get(DIRECTORY)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers a request for a version, or passes the request to the server."""
        path = scope["path"] if scope["type"] == "http" else ""
        if path == PATH and self._directory is None:
            await respond(send, 409, {"error": _NO_AGENT})
        elif path == PATH:
            try:
                request = json.loads(await _body(receive)) | {"server": _port(scope)}
                await respond(send, *await self._ask(request))
            except (ValueError, TypeError) as error:
                await respond(send, 400, {"error": f"not a request for a version: {error}"})
        else:
            await self._app(scope, receive, send)
            if path == _DISCONNECT and self._directory is not None:
                await self._ask({"server": _port(scope)})

    async def _ask(self, request: dict[str, Any]) -> tuple[int, Any]:
        """Returns status and body of the agent's answer; asks again if the agent is killed."""
        failure = ""
        for _ in range(_ATTEMPTS):
            try:
                reader, writer = await self._connected()
                try:
                    writer.write(json.dumps(request).encode() + b"\n")
                    answer = json.loads(await reader.readline())
                    return answer["status"], answer["body"]
                finally:
                    writer.close()
            except (OSError, ValueError) as error:
                failure = str(error)
        return 502, {"error": f"the agent of the server's host does not answer: {failure}"}

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        end = asyncio.get_running_loop().time() + _RESTART
        while True:
            try:
                return await asyncio.open_unix_connection(f"{self._directory}/{SOCKET}")
            except OSError:
                if asyncio.get_running_loop().time() > end:
                    raise
                await asyncio.sleep(0.2)


def _port(scope: Message) -> str:
    return str((scope.get("server") or ("", 0))[1])


async def _body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > _MAX_BODY:
            raise ValueError("it is too large")
        if not message.get("more_body", False):
            return body
