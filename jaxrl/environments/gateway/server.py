"""The endpoint that the agents of all episodes of a run talk to, in threads of this process."""

import asyncio
import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxrl.environments.gateway.anthropic_messages import MESSAGES
from jaxrl.environments.gateway.dialect import (
    STATUS,
    Dialect,
    TurnAnswer,
    TurnRefusedError,
    TurnRequest,
    refuse,
)
from jaxrl.environments.gateway.openai_chat import CHAT
from jaxrl.environments.gateway.openai_responses import RESPONSES
from jaxrl.environments.gateway.session import Endpoint, Session

_MOST_BYTES = 1 << 25  # of a body, which takes many times as much memory once it is read
_TURNS = {"chat/completions": CHAT, "responses": RESPONSES, "messages": MESSAGES}

Ask = Callable[[TurnRequest], Awaitable[TurnAnswer]]
"""A request for a turn -> the policy's turn."""


class Gateway:
    """An HTTP server with a session for each episode."""

    def __init__(self, host: str, port: int, models: Sequence[str]) -> None:
        """Starts the server; raises OSError if the address is taken. Requests name one of
        `models`."""
        self._models, self._sessions = tuple(models), dict[str, Session]()
        listening = socket.create_server((host, port), backlog=1024)
        self.url = f"http://{host}:{listening.getsockname()[1]}"
        # A log config of its own would close the handlers of other libraries.
        quiet: Any = {"log_config": None, "log_level": "warning", "lifespan": "off"}
        config = uvicorn.Config(self._application(), **quiet)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([listening],), name="gateway", daemon=True
        )
        self._thread.start()

    def open(self) -> Session:
        """Begins the session of an episode."""
        key = secrets.token_urlsafe(16)
        url = f"{self.url}/s/{key}"
        session = Session(Endpoint(url, f"{url}/v1", key, self._models[0]))
        self._sessions[key] = session
        return session

    def close(self, session: Session) -> None:
        """Ends a session; its key is then unknown."""
        session.end()
        self._sessions.pop(session.endpoint.key, None)

    def stop(self) -> None:
        """Ends the server."""
        self._server.should_exit = True
        self._thread.join()

    def _application(self) -> Starlette:
        routes = list[Route]()
        for prefix in ("", "/s/{key}"):
            routes += turn_routes(prefix, self._open)
            for path, handler, method in (
                ("v1/models", self._list, "GET"),
                ("reward", self._reward, "POST"),
            ):
                routes.append(gateway_route(f"{prefix}/{path}", handler, method=method))
        return Starlette(routes=routes)

    def _open(self, request: Request) -> Ask:
        session = self._session(request)

        async def ask(asked: TurnRequest) -> TurnAnswer:
            if asked.model not in self._models:
                raise TurnRefusedError(
                    "model",
                    f"the model {asked.model!r:.80} is not here; the policy is "
                    f"{' or '.join(map(repr, self._models))} (environment.models)",
                )
            return await asyncio.wrap_future(session.ask(asked))

        return ask

    async def _list(self, request: Request) -> Response:
        self._session(request)
        created = int(time.time())
        shared = {"object": "model", "created": created, "owned_by": "jaxrl", "type": "model"}
        return JSONResponse(
            {"object": "list", "data": [{"id": name} | shared for name in self._models]}
        )

    async def _reward(self, request: Request) -> Response:
        session = self._session(request)
        reward, metrics = await read_reward(request)
        session.add(reward, metrics)
        return JSONResponse({"reward": reward})

    def _session(self, request: Request) -> Session:
        key = request.path_params.get("key") or sent_key(request)
        if key not in self._sessions:
            raise TurnRefusedError(
                "key",
                "no running episode has this key; take it from the address or the variables that "
                "jaxrl gives the agent",
            )
        return self._sessions[key]


def turn_routes(prefix: str, opened: Callable[[Request], Ask]) -> list[Route]:
    """Makes the routes of all dialects, below `prefix`, for requests of turns.

    `opened` checks the key of a request and returns the function that answers it; both may raise
    TurnRefusedError.
    """

    def made(path: str, dialect: Dialect) -> Route:
        async def answer(request: Request) -> Response:
            ask, body = opened(request), await _body(request)
            try:
                asked = dialect.read(body)
            except KeyError as missing:
                raise TurnRefusedError("invalid", f"the request lacks {missing}") from missing
            except (TypeError, AttributeError, ValueError) as error:
                raise TurnRefusedError(
                    "invalid", f"the request cannot be read: {error!r}"
                ) from error
            refuse(
                not isinstance(asked.model, str), f"model is {asked.model!r:.80}; expected a text"
            )
            found = await ask(asked)
            if asked.stream:
                events = b"".join(dialect.stream(asked, found))
                return Response(events, media_type="text/event-stream")
            return JSONResponse(dict(dialect.whole(asked, found)))

        return gateway_route(f"{prefix}/v1/{path}", answer, dialect=dialect)

    return [made(path, dialect) for path, dialect in _TURNS.items()]


async def read_reward(request: Request) -> tuple[float, dict[str, float]]:
    """Reads the body of a posted reward: the reward and its metrics; raises TurnRefusedError."""
    body = await _body(request)
    try:
        metrics = {str(name): float(value) for name, value in body.get("metrics", {}).items()}
        return float(body["reward"]), metrics
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise TurnRefusedError(
            "invalid", f'expected {{"reward": number, "metrics": {{name: number}}}}: {error!r}'
        ) from error


def sent_key(request: Request) -> str:
    """Returns the key of a request in the header that OpenAI's or Anthropic's clients send."""
    sent = request.headers.get("authorization", "").partition(" ")[2]
    return request.headers.get("x-api-key") or sent


def gateway_route(
    path: str, handler: Callable[[Request], Any], *, dialect: Dialect = CHAT, method: str = "POST"
) -> Route:
    """Makes a route that reports errors in a dialect."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except TurnRefusedError as refused:
            error = refused
        except Exception as failed:
            error = TurnRefusedError("server", f"jaxrl failed: {failed!r}")
        content = dict(dialect.error(error))
        return JSONResponse(content, status_code=STATUS[error.kind])

    return Route(path, endpoint, methods=[method])


async def _body(request: Request) -> Mapping[str, Any]:
    sent = bytearray()
    async for part in request.stream():
        sent += part
        text = f"the body has more than {_MOST_BYTES} bytes; send a shorter conversation"
        refuse(len(sent) > _MOST_BYTES, text)
    with contextlib.suppress(ValueError, RecursionError):
        body = json.loads(sent)
        if isinstance(body, dict):
            return body
    raise TurnRefusedError("invalid", "the body is no JSON object")
