"""The common parts of all routes of a service: keys, owners, errors."""

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxrl.service import answers
from jaxrl.service.engine import Engine
from jaxrl.service.wire import RefusedError


class MissingError(Exception):
    """A session, model, sampler or request that is not there, or belongs to another key."""


_MOST_JSON = 1 << 25  # bytes of a body, which takes many times as much memory once it is read

BAD = (ValueError, OverflowError)
"""What a body that cannot be served raises; also pydantic, protobuf and JSON do."""


class Service(NamedTuple):
    """The inputs of the routes.

    Attributes:
      engine: does the work.
      name: the base model's name; clients may also give its directory.
      directory: of the base model.
      keys: accepted keys and their owners.
      seed: of adapters whose client names none.
    """

    engine: Engine
    name: str
    directory: Path
    keys: Mapping[str, str]
    seed: int


Handler = Callable[[Service, str, Request], Awaitable[Response]]


def route(service: Service, path: str, handler: Handler, *, method: str = "POST") -> Route:
    """Makes a route that asks for a key and turns errors into answers."""

    async def endpoint(request: Request) -> Response:
        owner = service.keys.get(request.headers.get("x-api-key", ""))
        if owner is None:
            return error(401, "the key is missing or unknown; set TINKER_API_KEY to the server's")
        try:
            return await handler(service, owner, request)
        except MissingError as missing:
            return error(404, str(missing))
        except BAD as refused:
            return error(400, str(refused))
        except ClientDisconnect:
            return error(400, "the client has gone before the end of its body")

    return Route(f"/api/v1/{path}", endpoint, methods=[method])


def error(status: int, text: str) -> JSONResponse:
    """Makes the answer to a request that is refused."""
    return JSONResponse({"error": text, "detail": text}, status_code=status)


def reply(response: Any) -> Response:
    """Makes an answer of one of the client's own types."""
    return Response(answers.encode(response), media_type="application/json")


async def read_object(request: Request) -> dict[str, Any]:
    """Reads a body, which must be an object of JSON; raises RefusedError for another, or for one
    that is too large."""
    body = await request.body()
    if len(body) > _MOST_JSON:
        raise RefusedError(f"the body has {len(body)} bytes; JSON may have {_MOST_JSON} at once")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as wrong:
        raise RefusedError(f"the body is no JSON ({wrong}); send an object") from None
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise RefusedError(f"the body is no object of JSON but of type {kind}; send one")
    return found


def owned(
    service: Service, table: str, *, key: Any, owner: str, columns: str = "*"
) -> dict[str, Any]:
    """Returns these columns of a row that belongs to the owner.

    Raises:
      MissingError: if there is none, in the same words whether another owner has it or nobody.
      RefusedError: for a key that is no text.
    """
    if not isinstance(key, str):
        raise RefusedError(f"{table}: {key!r:.80} is no id; give the text that this server gave")
    text = f"SELECT {columns} FROM {table} WHERE id = ? AND owner = ?"
    if (row := service.engine.store.one(text, key, owner)) is None:
        raise MissingError(f"{table}: {key!r} is not there; create it with this server and key")
    return row
