"""Runs inside vLLM: lets nobody in who does not know the server's key.

vLLM's own `--api-key` guards the routes of its API and leaves open those that change weights, pause
the server or call its methods.
"""

import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY = "JAXRL_API_KEY"
"""The environment variable with the key, of servers and of those who ask them."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_OPEN = ("/health", "/metrics")
_REFUSAL = f"this server wants its key: set {KEY} to what it was started with"


def headers(key: str | None) -> dict[str, str]:
    """What a request carries."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


class Guard:
    """ASGI middleware: 401 to every request without the key, but for those that only look how the
    server is."""

    def __init__(self, app: App) -> None:
        """Reads the key.

        Raises:
          KeyError: if the environment has none.
        """
        self._app = app
        self._expected = f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers, or lets the server answer."""
        if scope["type"] == "lifespan" or scope["path"] in _OPEN or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            kind = (b"content-type", b"application/json")
            await send({"type": "http.response.start", "status": 401, "headers": [kind]})
            body = json.dumps({"error": _REFUSAL}).encode()
            await send({"type": "http.response.body", "body": body})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _knows(self, scope: Message) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(given) == 1 and secrets.compare_digest(given[0], self._expected)
