"""Downloads of checkpoints: addresses that need no key, because they are signed and expire."""

import datetime
import hmac
import time
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from tinker import types

from jaxrl.service.routing import MissingError, Service, error, reply, route
from jaxrl.service.wire import RefusedError

_SECONDS = 3600  # for which an address is valid
_FILES = "/api/v1/files"


def download_routes(service: Service) -> list[Route]:
    """Lists the routes of signed addresses, and of the files that they name."""

    async def file(request: Request) -> Response:
        return _file(service, request)

    one = "training_runs/{run}/checkpoints/external_weights/{name}/external_weights_urls"
    return [
        route(service, one, _addresses, method="GET"),
        Route(f"{_FILES}/{{run}}/{{name}}/{{file}}", file, methods=["GET"]),
    ]


async def _addresses(service: Service, owner: str, request: Request) -> Response:
    """Signs the address of each file, with the key of the checkpoint's owner."""
    path = _path(request)
    key = _key(service, service.engine.checkpoints.readable(path, owner)["owner"])
    if key is None:
        raise MissingError(f"there is no checkpoint {path!r}; list your own")
    expires = int(time.time()) + _SECONDS
    urls = {}
    for file in sorted(service.engine.files.checkpoint(path).iterdir()):
        parts = (request.path_params["run"], request.path_params["name"], file.name)
        place = "/".join([_FILES, *(quote(part, safe=":") for part in parts)])
        signature = _signature(key, *parts, expires=expires)
        root = str(request.base_url).rstrip("/")
        urls[file.name] = f"{root}{place}?expires={expires}&signature={signature}"
    end = datetime.datetime.fromtimestamp(expires, datetime.UTC)
    return reply(types.ExternalWeightsUrlsResponse(urls=urls, expires=end))


def _file(service: Service, request: Request) -> Response:
    """Sends a file to whoever has its address."""
    named, path = request.path_params, _path(request)
    try:
        key = _key(service, service.engine.checkpoints.find(path)["owner"])
    except RefusedError:
        key = None
    expires = request.query_params.get("expires", "")
    if key is None or not expires.isdecimal() or int(expires) < time.time():
        return error(403, f"the address of {path} is not valid any more; ask for another one")
    signature = _signature(key, named["run"], named["name"], named["file"], expires=int(expires))
    if not hmac.compare_digest(signature, request.query_params.get("signature", "")):
        return error(403, f"the signature does not fit {path}; ask for the address again")
    return FileResponse(service.engine.files.checkpoint(path) / named["file"])


def _path(request: Request) -> str:
    return "tinker://{run}/external_weights/{name}".format(**request.path_params)


def _key(service: Service, owner: str) -> str | None:
    return next((key for key, its in service.keys.items() if its == owner), None)


def _signature(key: str, *parts: str, expires: int) -> str:
    return hmac.new(key.encode(), repr((parts, expires)).encode(), "sha256").hexdigest()
