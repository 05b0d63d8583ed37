"""The routes of the Tinker API for training and sampling; `jaxrl.service.listing` has the rest."""

import functools
import json
import time
import uuid
from typing import Any

import zstandard
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tinker import types
from tinker.proto import tinker_public_pb2 as proto

from jaxrl.service import answers
from jaxrl.service.accepting import accept
from jaxrl.service.futures import cancel, retrieve
from jaxrl.service.pool import Kind
from jaxrl.service.requests import with_seed
from jaxrl.service.routing import Handler, Service, owned, read_object, reply, route
from jaxrl.service.sampling import BASE
from jaxrl.service.servers import NO_HEAD
from jaxrl.service.state import dumps
from jaxrl.service.uploaded.graph import MOST_BYTES, read_graph
from jaxrl.service.uploaded.program import check
from jaxrl.service.wire import RefusedError

_MOST_BYTES = 1 << 28  # of a body, expanded; the client sends 5 MB at once
_MOST_RANK = 1024  # one without end would take the memory of all tenants
_FULL = "rank = 0 trains all parameters"


def routes(service: Service) -> list[Route]:
    """Lists the routes of sessions, training, sampling and futures."""
    posts: dict[str, Handler] = {
        "create_session": _create_session,
        "session_heartbeat": _heartbeat,
        "sessions/{session}/finish": _heartbeat,
        "client/config": _config,
        "client/dynamic_config": _dynamic_config,
        "telemetry": _telemetry,
        "create_model": _create_model,
        "create_custom_loss": _create_loss,
        "load_weights": _load_weights,
        "get_info": _get_info,
        "forward_backward": _forward_backward,
        "optim_step": functools.partial(_in_order, kind="step"),
        "save_weights": functools.partial(_in_order, kind="save"),
        "save_weights_for_sampler": functools.partial(_in_order, kind="publish"),
        "save_weights_external": functools.partial(_in_order, kind="external"),
        "create_sampling_session": _create_sampler,
        "join_sampling_session": _join_sampler,
        "asample": _sample,
        "retrieve_future": retrieve,
        "cancel_future": cancel,
    }
    found = [route(service, path, handler) for path, handler in posts.items()]
    found.append(route(service, "get_server_capabilities", _capabilities, method="GET"))
    found.append(Route("/api/v1/healthz", lambda _: JSONResponse({"status": "ok"})))
    return found


def application(service: Service, more: list[Route]) -> Starlette:
    """Makes the ASGI application; `more` are further routes. Whoever sets the events in its
    `state.polls` tells the clients that wait for a result to ask again."""
    found = Starlette(routes=[*routes(service), *more], middleware=[Middleware(_Bounded)])
    found.state.polls = set()
    return found


class _Bounded:
    """Refuses bodies that are too large while they are read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > _MOST_BYTES:
                raise _too_large()
            return message

        await self._app(scope, bounded, send)


def _too_large() -> RefusedError:
    return RefusedError(f"the body has more than {_MOST_BYTES} bytes; send fewer data at once")


async def _create_session(service: Service, owner: str, request: Request) -> Response:
    asked = types.CreateSessionRequest.model_validate(await read_object(request))
    await run_in_threadpool(service.engine.checkpoints.expire)
    session = f"session-{uuid.uuid4().hex[:12]}"
    content = asked.model_dump(include={"tags", "user_metadata", "display_name"})
    service.engine.store.insert(
        "sessions", id=session, owner=owner, created=time.time(), content=dumps(content)
    )
    return reply(types.CreateSessionResponse(session_id=session))


async def _heartbeat(service: Service, owner: str, request: Request) -> Response:
    session = request.path_params.get("session")
    if session is None:
        session = types.SessionHeartbeatRequest.model_validate(
            await read_object(request)
        ).session_id
    owned(service, "sessions", key=session, owner=owner)
    return reply(types.SessionHeartbeatResponse())


async def _config(service: Service, owner: str, request: Request) -> Response:
    return reply(
        types.ClientConfigResponse(
            use_pyqwest_transport=False,
            sample_join_sampling_session=True,
            custom_loss_server_side=True,
        )
    )


async def _dynamic_config(service: Service, owner: str, request: Request) -> Response:
    return reply(types.ClientDynamicConfigResponse(sample_cancel_enabled=True))


async def _telemetry(service: Service, owner: str, request: Request) -> Response:
    return reply(types.TelemetryResponse(status="accepted"))


async def _capabilities(service: Service, owner: str, request: Request) -> Response:
    model = types.SupportedModel(
        model_name=service.name,
        max_context_length=service.engine.limits.max_positions,
        trainable=True,
        sampleable=True,
    )
    return reply(types.GetServerCapabilitiesResponse(supported_models=[model]))


def _check_base(service: Service, name: str) -> None:
    if name not in (service.name, str(service.directory)):
        raise RefusedError(f"base_model = {name!r}: this server has {service.name!r} alone")


async def _create_model(service: Service, owner: str, request: Request) -> Response:
    asked = types.CreateModelRequest.model_validate(await read_object(request))
    owned(service, "sessions", key=asked.session_id, owner=owner)
    _check_base(service, asked.base_model)
    if asked.optimizer_config.type != "adamw":
        raise RefusedError(f"optimizer {asked.optimizer_config.type!r} is unknown; use adamw")
    config = asked.lora_config or types.LoraConfig(rank=0)
    if not 0 <= config.rank <= _MOST_RANK:
        raise RefusedError(f"rank = {config.rank}: it must be 1 to {_MOST_RANK}; {_FULL}")
    parts = (config.train_attn, config.train_mlp, config.train_unembed)
    if config.rank and not any(parts):
        raise RefusedError("nothing is trained; set train_attn, train_mlp or train_unembed")
    kind = service.engine.served(Kind(config.rank, *(part or not config.rank for part in parts)))
    content = {
        **kind._asdict(),
        "seed": service.seed if config.seed is None else config.seed % 2**31,
        "user_metadata": asked.user_metadata,
    }
    model = f"{asked.session_id}:train:{asked.model_seq_id}"
    body = asked.model_dump_json().encode()
    return await _new_model(service, owner, model, content, kind="create", body=body)


async def _new_model(
    service: Service, owner: str, model: str, content: dict[str, Any], *, kind: str, body: bytes
) -> Response:
    now, session = time.time(), model.split(":train:")[0]
    values = {"session": session, "owner": owner, "created": now, "used": now}
    service.engine.store.insert("models", id=model, content=dumps(content), **values)
    return await accept(service, owner, kind=kind, target=model, seq=0, body=body)


async def _create_loss(service: Service, owner: str, request: Request) -> Response:
    if int(request.headers.get("content-length", MOST_BYTES + 1)) > MOST_BYTES:
        raise RefusedError(f"a loss is larger than {MOST_BYTES} bytes, or has no content-length")
    body = await request.body()

    def create() -> Response:
        check(read_graph(body))
        asked = types.CreateCustomLossRequest.model_validate_json(body)
        owned(service, "sessions", key=asked.session_id, owner=owner)
        name = f"{asked.session_id}:loss:{asked.custom_loss_seq_id}"
        answer = answers.encode(types.CreateCustomLossResponse(loss_id=name))
        values = {"status": "done", "answer": answer, "form": "json", "created": time.time()}
        values |= {"target": name, "seq": 0, "owner": owner, "kind": "loss", "body": body}
        service.engine.store.insert("requests", id=name, **values)
        return reply(types.UntypedAPIFuture(request_id=name))

    return await run_in_threadpool(create)


async def _load_weights(service: Service, owner: str, request: Request) -> Response:
    content = await read_object(request)
    if content.get("session_id") is not None:
        return await _new_from_weights(service, owner, content)
    model = owned(service, "models", key=content.get("model_id"), owner=owner)["id"]

    def check() -> None:
        asked = types.LoadWeightsRequest.model_validate(content)
        row, own = _loadable(service, owner, asked), service.engine.kind(model)
        if (kind := Kind.of(row)) != own:
            raise RefusedError(f"{asked.path} holds {kind}, and {model} {own}")

    given = {"seq": content.get("seq_id"), "body": await request.body()}
    return await accept(service, owner, kind="load", target=model, check=check, **given)


async def _new_from_weights(service: Service, owner: str, given: dict[str, Any]) -> Response:
    asked = types.LoadWeightsRequest.model_validate(given)
    row = _loadable(service, owner, asked)
    owned(service, "sessions", key=asked.session_id, owner=owner)
    if asked.base_model is not None:
        _check_base(service, asked.base_model)
    kind = Kind.of(row)
    if service.engine.served(kind) != kind:
        raise RefusedError(f"{asked.path} adapts the output layer; {NO_HEAD}")
    content = {**kind._asdict(), "seed": row["seed"], "user_metadata": asked.user_metadata}
    model = f"{asked.session_id}:train:{asked.model_seq_id}"
    body = asked.model_dump_json().encode()
    return await _new_model(service, owner, model, content, kind="load", body=body)


def _loadable(service: Service, owner: str, asked: types.LoadWeightsRequest) -> dict[str, Any]:
    """Returns the row of a checkpoint that a model can go on from; raises RefusedError."""
    row = service.engine.checkpoints.readable(asked.path, owner)
    if row["kind"] != "training":
        raise RefusedError(f"{asked.path} holds weights alone; load one of save_state")
    if asked.optimizer_config is not None and asked.optimizer_config.type != "adamw":
        raise RefusedError(f"optimizer {asked.optimizer_config.type!r} is unknown; use adamw")
    return row


async def _get_info(service: Service, owner: str, request: Request) -> Response:
    asked = types.GetInfoRequest.model_validate(await read_object(request))
    content = json.loads(owned(service, "models", key=asked.model_id, owner=owner)["content"])
    data = types.ModelData(
        arch=service.engine.base.model.config.model_type,
        model_name=service.name,
        tokenizer_id=str(service.directory),
    )
    return reply(
        types.GetInfoResponse(
            type="get_info",
            model_data=data,
            model_id=asked.model_id,
            is_lora=content["rank"] > 0,
            lora_rank=content["rank"] or None,
            model_name=service.name,
        )
    )


async def _forward_backward(service: Service, owner: str, request: Request) -> Response:
    body = await request.body()
    if request.headers.get("content-encoding") == "zstd":
        body = _expanded(body)
    try:
        asked = proto.ForwardBackwardRequest.FromString(body)
    except Exception as damaged:
        raise RefusedError(f"the body is no ForwardBackwardRequest: {damaged}") from None
    owned(service, "models", key=asked.model_id, owner=owner)
    return await accept(
        service, owner, kind="compute", target=asked.model_id, seq=asked.seq_id, body=body
    )


def _expanded(body: bytes) -> bytes:
    """Decompresses a body; raises RefusedError for one that is damaged or too large."""
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            found = reader.read(_MOST_BYTES + 1)
    except zstandard.ZstdError as damaged:
        raise RefusedError(f"the body is no zstd: {damaged}") from None
    if len(found) > _MOST_BYTES:
        raise _too_large()
    return found


async def _in_order(service: Service, owner: str, request: Request, *, kind: str) -> Response:
    content = await read_object(request)
    target = owned(service, "models", key=content.get("model_id"), owner=owner)["id"]
    given = {"seq": content.get("seq_id"), "body": await request.body()}
    return await accept(service, owner, kind=kind, target=target, **given)


async def _create_sampler(service: Service, owner: str, request: Request) -> Response:
    asked = types.CreateSamplingSessionRequest.model_validate(await read_object(request))
    owned(service, "sessions", key=asked.session_id, owner=owner)
    path = BASE
    if asked.model_path is not None:
        service.engine.checkpoints.readable(asked.model_path, owner)
        path = service.engine.checkpoints.lasting(asked.model_path)
    else:
        _check_base(service, asked.base_model or "")
    sampler = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
    service.engine.store.insert(
        "samplers",
        id=sampler,
        session=asked.session_id,
        owner=owner,
        created=time.time(),
        path=path,
        next_clone=1,
    )
    return reply(types.CreateSamplingSessionResponse(sampling_session_id=sampler))


async def _join_sampler(service: Service, owner: str, request: Request) -> Response:
    asked = types.JoinSamplingSessionRequest.model_validate(await read_object(request))
    row = owned(service, "samplers", key=asked.sampling_session_id, owner=owner)
    with service.engine.store.transaction() as db:
        db.execute("UPDATE samplers SET next_clone = next_clone + 1 WHERE id = ?", (row["id"],))
        (found,) = db.execute(
            "SELECT next_clone FROM samplers WHERE id = ?", (row["id"],)
        ).fetchone()
    return reply(types.JoinSamplingSessionResponse(client_counter=found - 1))


async def _sample(service: Service, owner: str, request: Request) -> Response:
    content = await read_object(request)
    sampler, seq = content.get("sampling_session_id"), content.get("seq_id")
    if sampler is None or seq is None:
        raise RefusedError("sampling_session_id or seq_id is missing; create a sampling session")
    row = owned(service, "samplers", key=sampler, owner=owner)
    body, path = json.dumps(with_seed(content)).encode(), row["path"]

    def check() -> None:
        if path != BASE:  # it may have been unpublished
            service.engine.checkpoints.readable(path, owner)

    given = {"seq": seq, "body": body, "weights": path, "check": check}
    return await accept(service, owner, kind="sample", target=sampler, **given)
