"""Access control of a server; runs inside vLLM.

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

_SCHEMES = (b"http://", b"https://")  # a proxy may add TLS
_OPEN = ("/health", "/metrics")
_WRONG_KEY = (
    f"the key is missing or wrong: set {KEY} to the key that the server was started with; a server "
    "that was given none has the key in ~/.config/jaxrl/key where it was started"
)
_FOREIGN = "the request comes from a web page of another origin; a server answers none of them"


def headers(key: str | None) -> dict[str, str]:
    """Returns the headers of a request."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


async def respond(send: Send, status: int, body: Any) -> None:
    """Answers a request with JSON."""
    kind = (b"content-type", b"application/json")
    await send({"type": "http.response.start", "status": status, "headers": [kind]})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


class RequireKey:
    """ASGI middleware: answers 401 to requests without the key, except health and metrics, and 403
    to requests that a browser sends for a web page of another origin."""

    def __init__(self, app: App) -> None:
        """Reads the key from the environment; raises KeyError or ValueError without one."""
        if not os.environ[KEY]:
            raise ValueError(f"{KEY} is empty; set it to a secret")
        self._app = app
        self._expected = f"Bearer {os.environ[KEY]}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Rejects a request or passes it to the server."""
        refusal = None if scope["type"] == "lifespan" else self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await respond(send, refusal[0], {"error": refusal[1]})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _refusal(self, scope: Message) -> tuple[int, str] | None:
        if _is_foreign(scope):
            return 403, _FOREIGN
        if scope["path"] in _OPEN or self._has_key(scope):
            return None
        return 401, _WRONG_KEY

    def _has_key(self, scope: Message) -> bool:
        given = header_values(scope, b"authorization")
        return len(given) == 1 and secrets.compare_digest(given[0], self._expected)


def _is_foreign(scope: Message) -> bool:
    """Tells whether a browser sent the request for a page of another server."""
    # Other clients send no Origin.
    own = [scheme + host for scheme in _SCHEMES for host in header_values(scope, b"host")]
    return any(origin not in own for origin in header_values(scope, b"origin"))


def header_values(scope: Message, header: bytes) -> list[bytes]:
    """Returns the values of a request's header, whose name is given in lower case."""
    return [value for name, value in scope["headers"] if name.lower() == header]
