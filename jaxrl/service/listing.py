"""The routes of sessions, training runs and checkpoints: to list, publish, delete and expire."""

import datetime
import json
import re
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tinker import types

from jaxrl.service.files import divided
from jaxrl.service.pool import Kind
from jaxrl.service.requests import check_ttl
from jaxrl.service.routing import MissingError, Service, owned, read_object, reply, route
from jaxrl.service.wire import RefusedError

_NONE = Response(status_code=204)


def listing_routes(service: Service) -> list[Route]:
    """Lists the routes."""
    one = "training_runs/{run}/checkpoints/{kind}/{name}"
    gets = {
        "sessions": _sessions,
        "sessions/{session}": _session,
        "samplers/{sampler}": _sampler,
        "training_runs": _runs,
        "training_runs/{run}": _run,
        "training_runs/{run}/checkpoints": _checkpoints_of,
        "checkpoints": _checkpoints,
    }
    found = [route(service, path, handler, method="GET") for path, handler in gets.items()]
    return [
        *found,
        route(service, "weights_info", _weights_info),
        route(service, one, _delete, method="DELETE"),
        route(service, f"{one}/publish", _publish),
        route(service, f"{one}/publish", _publish, method="DELETE"),
        route(service, f"{one}/ttl", _set_ttl, method="PUT"),
    ]


def _page(request: Request) -> tuple[int, int]:
    limit = request.query_params.get("limit", "20")
    offset = request.query_params.get("offset", "0")
    numbers = all(re.fullmatch("[0-9]{1,9}", one) for one in (limit, offset))
    if not (numbers and int(limit)):
        raise RefusedError(
            f"limit = {limit!r:.80}, offset = {offset!r:.80}: they must be whole numbers, limit "
            "at least 1"
        )
    return int(limit), int(offset)


def _cursor(limit: int, offset: int, total: int) -> types.Cursor:
    return types.Cursor(offset=offset, limit=limit, total_count=total)


async def _sessions(service: Service, owner: str, request: Request) -> Response:
    limit, offset = _page(request)
    rows = service.engine.store.all(
        "SELECT id FROM sessions WHERE owner = ? ORDER BY rowid DESC LIMIT ? OFFSET ?",
        owner,
        limit,
        offset,
    )
    return reply(types.ListSessionsResponse(sessions=[row["id"] for row in rows]))


async def _session(service: Service, owner: str, request: Request) -> Response:
    row = owned(service, "sessions", key=request.path_params["session"], owner=owner)
    content, store = json.loads(row["content"]), service.engine.store
    return reply(
        types.GetSessionResponse(
            training_run_ids=[
                r["id"] for r in store.all("SELECT id FROM models WHERE session = ?", row["id"])
            ],
            sampler_ids=[
                r["id"] for r in store.all("SELECT id FROM samplers WHERE session = ?", row["id"])
            ],
            user_metadata=content["user_metadata"],
            display_name=content["display_name"],
        )
    )


async def _sampler(service: Service, owner: str, request: Request) -> Response:
    row = owned(service, "samplers", key=request.path_params["sampler"], owner=owner)
    return reply(
        types.GetSamplerResponse(
            sampler_id=row["id"],
            base_model=service.name,
            model_path=divided(row["path"])[0] or None,
        )
    )


async def _runs(service: Service, owner: str, request: Request) -> Response:
    limit, offset = _page(request)
    store = service.engine.store
    rows = store.all(
        "SELECT * FROM models WHERE owner = ? ORDER BY rowid DESC LIMIT ? OFFSET ?",
        owner,
        limit,
        offset,
    )
    (total,) = store.all("SELECT count(*) AS n FROM models WHERE owner = ?", owner)
    return reply(
        types.TrainingRunsResponse(
            training_runs=[_training_run(service, row) for row in rows],
            cursor=_cursor(limit, offset, total["n"]),
        )
    )


async def _run(service: Service, owner: str, request: Request) -> Response:
    row = owned(service, "models", key=request.path_params["run"], owner=owner)
    return reply(_training_run(service, row))


def _training_run(service: Service, row: dict[str, Any]) -> types.TrainingRun:
    content = json.loads(row["content"])
    last = {}
    for kind in ("training", "sampler"):
        found = service.engine.store.one(
            "SELECT * FROM checkpoints WHERE model = ? AND kind = ? "
            "AND (expires IS NULL OR expires > ?) ORDER BY rowid DESC",  # whatever the clock said
            row["id"],
            kind,
            time.time(),
        )
        last[kind] = found and _checkpoint(found)
    return types.TrainingRun(
        training_run_id=row["id"],
        base_model=service.name,
        model_owner=row["owner"],
        is_lora=content["rank"] > 0,
        lora_rank=content["rank"] or None,
        last_request_time=_time(row["used"]),
        last_checkpoint=last["training"],
        last_sampler_checkpoint=last["sampler"],
        user_metadata=content["user_metadata"],
    )


def _checkpoint(row: dict[str, Any]) -> types.Checkpoint:
    parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(row["path"])
    return types.Checkpoint(
        checkpoint_id=parsed.checkpoint_id,
        checkpoint_type=parsed.checkpoint_type,
        time=_time(row["created"]),
        tinker_path=row["path"],
        size_bytes=row["size"],
        public=bool(row["public"]),
        user_metadata=json.loads(row["content"])["user_metadata"],
        expires_at=row["expires"] and _time(row["expires"]),
    )


def _time(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


async def _checkpoints_of(service: Service, owner: str, request: Request) -> Response:
    service.engine.checkpoints.expire()
    run = owned(service, "models", key=request.path_params["run"], owner=owner)
    rows = service.engine.store.all(
        "SELECT * FROM checkpoints WHERE model = ? AND kind != 'ephemeral' ORDER BY rowid",
        run["id"],
    )
    return reply(types.CheckpointsListResponse(checkpoints=[_checkpoint(row) for row in rows]))


async def _checkpoints(service: Service, owner: str, request: Request) -> Response:
    service.engine.checkpoints.expire()
    limit, offset = _page(request)
    rows = service.engine.store.all(
        "SELECT * FROM checkpoints WHERE owner = ? AND kind != 'ephemeral' ORDER BY rowid DESC",
        owner,
    )
    return reply(
        types.CheckpointsListResponse(
            checkpoints=[_checkpoint(row) for row in rows[offset : offset + limit]],
            cursor=_cursor(limit, offset, len(rows)),
        )
    )


async def _weights_info(service: Service, owner: str, request: Request) -> Response:
    path = (await read_object(request)).get("tinker_path")
    if not isinstance(path, str):
        raise RefusedError(f"tinker_path = {path!r:.80}: it must be the path of a checkpoint")
    row = service.engine.checkpoints.readable(path, owner)
    return reply(
        types.WeightsInfoResponse(
            base_model=service.name,
            is_lora=row["rank"] > 0,
            lora_rank=row["rank"] or None,
            train_unembed=Kind.of(row).unembed,
            train_mlp=row["mlp"],
            train_attn=row["attention"],
        )
    )


def _named(service: Service, owner: str, request: Request) -> str:
    """Returns the path of the checkpoint in the address; raises MissingError without one."""
    named = request.path_params
    path = f"tinker://{named['run']}/{named['kind']}/{named['name']}"
    row = service.engine.store.one("SELECT owner FROM checkpoints WHERE path = ?", path)
    if row is None or row["owner"] != owner:
        raise MissingError(f"there is no checkpoint {path!r}; list your own")
    return path


async def _delete(service: Service, owner: str, request: Request) -> Response:
    service.engine.checkpoints.remove(_named(service, owner, request))
    return _NONE


async def _publish(service: Service, owner: str, request: Request) -> Response:
    path = _named(service, owner, request)
    service.engine.store.update("checkpoints", path, public=int(request.method == "POST"))
    return _NONE


async def _set_ttl(service: Service, owner: str, request: Request) -> Response:
    path, ttl = _named(service, owner, request), (await read_object(request)).get("ttl_seconds")
    check_ttl(ttl)
    service.engine.store.update("checkpoints", path, expires=ttl and time.time() + ttl)
    return _NONE
