"""The page of live training runs: the report's page, with a curve for each tenant's steps."""

import base64
import hashlib
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
        asked = (request.url.path, request.query_params.get("since"))
        found = await run_in_threadpool(_answer, service, owner, *asked, page)
        found.headers["Cache-Control"] = "no-store"
        return found

    return [Route(path, endpoint) for path in ("/", "/data")]


def _answer(service: Service, owner: str, path: str, since: str | None, page: Page) -> Response:
    counts = service.engine.history.counts()
    rows = service.engine.store.all(
        "SELECT id, content FROM models WHERE owner = ? ORDER BY rowid", owner
    )
    newest = [row for row in rows if row["id"] in counts][-_MOST_RUNS:]
    steps = json.dumps([(row["id"], counts[row["id"]]) for row in newest])
    version = hashlib.sha256(steps.encode()).hexdigest()[:16]
    if since == version:
        return Response(status_code=204)
    runs = _runs(service, newest)
    if path == "/data":
        charts = page.charts(runs)
        return JSONResponse({"version": version, "runs": runs, "charts": charts})
    return HTMLResponse(page.render(runs, version=version) if runs else _WAITING)


def _runs(service: Service, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Describes training runs in the form of the report's page, those of rows of `models`."""
    engine = service.engine
    known = engine.history.runs([row["id"] for row in rows])
    found = []
    for row in rows:
        if row["id"] not in known:  # forgotten meanwhile
            continue
        content = json.loads(row["content"])
        config = {"model.path": service.name, "precision": engine.base.precision.text}
        config |= {key: content[key] for key in ("rank", "attention", "mlp", "seed")}
        one: dict[str, Any] = {"name": row["id"], "path": row["id"], "config": config}
        one |= {key: [] for key in ("starts", "rolled_back", "alarms", "samples", "held_out")}
        found.append(one | known[row["id"]])
    return found


def _key(request: Request) -> str:
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic":
        return request.headers.get("x-api-key", "")
    try:
        return base64.b64decode(text).decode().partition(":")[2]
    except ValueError:
        return ""
