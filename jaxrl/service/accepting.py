"""Accepts requests: checks them, writes them down and queues them.

The client numbers a model's requests, and each waits for those before it. A number is therefore
used up even if its request is refused.
"""

import json
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from tinker import types

from jaxrl.service import answers
from jaxrl.service.engine import Engine
from jaxrl.service.requests import Work, decode
from jaxrl.service.routing import BAD, Service, reply
from jaxrl.service.wire import RefusedError


async def accept(
    service: Service,
    owner: str,
    *,
    kind: str,
    target: str,
    seq: int | None,
    body: bytes,
    weights: str = "",
    check: Callable[[], None] = lambda: None,
) -> Response:
    """Checks a request, writes it down and queues it. A repeated one is answered alike. `check`
    raises RefusedError for one that cannot be served, after which those behind it have their
    turn."""
    if type(seq) is not int or seq < 0:  # its turn would never come
        raise RefusedError(f"seq_id = {seq!r}: number the requests, as the official client does")
    engine, name = service.engine, f"{target}:{seq}"

    def enter() -> Response:
        known = engine.store.one("SELECT status, answer FROM requests WHERE id = ?", name)
        if known is not None:
            return _acknowledged(engine, name, target)
        values = {"target": target, "seq": seq, "owner": owner, "kind": kind}
        ordered = kind != "sample"
        if ordered:
            engine.open_line(target)
        try:
            check()
            payload = decode(kind, body, engine.limits)
        except BAD as refused:
            if not ordered:
                raise
            # The number is used up: requests after it must not wait for it.
            if engine.store.accept(name, body=b"", **values):
                engine.finish(name, answers.failure(refused, user=True), failed=True)
                engine.queue.drop(target, seq)
            raise RefusedError(str(refused)) from None
        if not ordered:
            payload = engine.with_weights(payload, weights)
        if engine.store.accept(name, body=body, **values):
            engine.queue.add(Work(name, kind, target, seq, payload))
        return _acknowledged(engine, name, target)

    return await run_in_threadpool(enter)


def _acknowledged(engine: Engine, name: str, target: str) -> Response:
    row = engine.store.one("SELECT kind, status, answer, body FROM requests WHERE id = ?", name)
    assert row is not None
    if row["status"] == "failed" and row["body"] == b"":
        raise RefusedError(json.loads(row["answer"])["error"])
    found = types.UntypedAPIFuture(request_id=name, model_id=target)
    if row["kind"] == "sample" and row["body"]:
        count = int(json.loads(row["body"]).get("num_samples", 1))
        found = types.UntypedAPIFuture(
            request_id=name, sample_sequence_ids=[f"{name}:{i}" for i in range(count)]
        )
    return reply(found)
