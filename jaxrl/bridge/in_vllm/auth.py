"""API key of a server; runs inside vLLM.

vLLM's own `--api-key` leaves open the routes that change weights, pause the server or call methods
of its workers.
"""

import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY = "JAXRL_API_KEY"
"""Environment variable that holds the key, for servers and for their clients."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_OPEN = ("/health", "/metrics")
_REFUSAL = f"the key is missing or wrong: set {KEY} to the key that the server was started with"


def headers(key: str | None) -> dict[str, str]:
    """Returns the headers of a request."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


class RequireKey:
    """ASGI middleware that answers 401 to requests without the key, except health and metrics."""

    def __init__(self, app: App) -> None:
        """Reads the key from the environment; raises KeyError if it is not set."""
        self._app = app
        self._expected = f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Rejects a request or passes it to the server."""
        if scope["type"] == "lifespan" or scope["path"] in _OPEN or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            kind = (b"content-type", b"application/json")
            await send({"type": "http.response.start", "status": 401, "headers": [kind]})
            body = json.dumps({"error": _REFUSAL}).encode()
            await send({"type": "http.response.body", "body": body})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _has_key(self, scope: Message) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(given) == 1 and secrets.compare_digest(given[0], self._expected)
