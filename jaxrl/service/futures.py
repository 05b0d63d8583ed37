"""The routes of requests that were accepted: their results, and how they are cancelled."""

import asyncio
import contextlib
import functools

from starlette.requests import Request
from starlette.responses import Response
from tinker import types
from tinker.types.try_again_response import TryAgainResponse

from jaxrl.service.routing import Service, error, owned, read_object, reply
from jaxrl.service.wire import RefusedError

POLL_SECONDS = 20.0  # the client waits 45 for an answer


async def retrieve(service: Service, owner: str, request: Request) -> Response:
    """Answers with a request's result, which it waits for; without one the client asks again."""
    asked = types.FutureRetrieveRequest.model_validate(await read_object(request))
    engine, name = service.engine, asked.request_id
    row = functools.partial(owned, service, "requests", key=name, owner=owner)
    if row(columns="status")["status"] == "queued":
        loop, finished = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the server ends
                loop.call_soon_threadsafe(finished.set)

        polls: set[asyncio.Event] = request.app.state.polls
        engine.listen(name, tell)
        polls.add(finished)
        try:
            # It may have finished before `tell` was known.
            if row(columns="status")["status"] == "queued":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(finished.wait(), POLL_SECONDS)
        finally:
            polls.discard(finished)
            engine.forget(name, tell)
    found = row(columns="status, answer, form")
    if found["status"] == "queued":
        return reply(TryAgainResponse(request_id=name, queue_state="active", type="try_again"))
    if found["answer"] is None:
        return error(410, f"the answer to {name} is no longer kept")
    media = "application/x-protobuf" if found["form"] == "proto" else "application/json"
    return Response(found["answer"], media_type=media)


async def cancel(service: Service, owner: str, request: Request) -> Response:
    """Removes a request for samples that has not begun."""
    name = (await read_object(request)).get("request_id", "")
    owned(service, "requests", key=name, owner=owner, columns="id")
    work = service.engine.queue.cancel(name)
    if work is not None:
        service.engine.fail(work, RefusedError("the client cancelled the request"))
    return Response(status_code=204)
