"""The page of live training runs: the report's page, with a curve for each tenant's steps."""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from jaxrl.service.routing import Service, error

_MOST_RUNS = 8  # the page has so many colours
_WAITING = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2">'
    "<title>jaxrl</title><p>No optimizer step since the server's start."
)
_ASK = {"WWW-Authenticate": 'Basic realm="any name, and the key as password"'}


class Page(NamedTuple):
    """The report's page.

    Attributes:
      render: makes the page of runs; `version` names their state.
      charts: selects the charts of runs.
    """

    render: Callable[..., str]
    charts: Callable[[Sequence[Mapping[str, Any]]], list[dict[str, Any]]]


def live_routes(service: Service, page: Page) -> list[Route]:
    """Lists the routes: `/`, and `/data?since=VERSION`, which is 204 if nothing has changed. The
    key is the password that a browser asks for, or the header of every other route."""

    async def endpoint(request: Request) -> Response:
        owner = service.keys.get(_key(request))
        if owner is None:
            refused = error(401, "the key is missing or unknown; any name, and the key as password")
            refused.headers.update(_ASK)
            return refused
        version = str(service.engine.history.version)
        if request.query_params.get("since") == version:
            return Response(status_code=204)
        found = await run_in_threadpool(_answer, service, owner, version, request.url.path, page)
        found.headers["Cache-Control"] = "no-store"
        return found

    return [Route(path, endpoint) for path in ("/", "/data")]


def _answer(service: Service, owner: str, version: str, path: str, page: Page) -> Response:
    runs = live_runs(service, owner)
    if path == "/data":
        charts = page.charts(runs)
        return JSONResponse({"version": version, "runs": runs, "charts": charts})
    return HTMLResponse(page.render(runs, version=version) if runs else _WAITING)


def live_runs(service: Service, owner: str) -> list[dict[str, Any]]:
    """Describes an owner's newest training runs with a step since the server's start, oldest
    first, in the form of the report's page."""
    engine = service.engine
    known = engine.history.runs()
    rows = engine.store.all("SELECT * FROM models WHERE owner = ? ORDER BY created", owner)
    found = []
    for row in [one for one in rows if one["id"] in known][-_MOST_RUNS:]:
        content = json.loads(row["content"])
        config = {"model.path": service.name, "precision": engine.base.precision.text}
        config |= {key: content[key] for key in ("rank", "attention", "mlp", "seed")}
        found.append(
            {
                "name": row["id"],
                "path": row["id"],
                "config": config,
                "starts": [],
                "rolled_back": [],
                "alarms": [],
                "samples": [],
                "held_out": [],
                **known[row["id"]],
            }
        )
    return found


def _key(request: Request) -> str:
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic":
        return request.headers.get("x-api-key", "")
    try:
        return base64.b64decode(text).decode().partition(":")[2]
    except ValueError:
        return ""
