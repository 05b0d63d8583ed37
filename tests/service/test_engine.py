"""Answers that cannot be written."""

import json
import signal
import sqlite3
import threading
import time

import jax
import numpy as np
import pytest
from tinker import types
from tinker.proto import tinker_public_pb2 as proto

from jaxrl.core import Precision, cast
from jaxrl.service.devices import Devices
from jaxrl.service.engine import Engine
from jaxrl.service.files import Files
from jaxrl.service.pool import Base, Pool
from jaxrl.service.requests import Work, decode
from jaxrl.service.sampling import Answer, Request
from jaxrl.service.snapshots import Snapshots
from jaxrl.service.state import Store, dumps
from jaxrl.sharding import PRESETS, Layout, make_mesh
from tests import tiny

TENANTS = ("a", "b")


class Full(Store):
    """A disk that is full when the second request of a batch is answered."""

    failed = False

    def finish(self, request, answer, *, form, status="done"):
        if request == "b:1" and not self.failed:
            self.failed = True
            raise sqlite3.OperationalError("database or disk is full")
        super().finish(request, answer, form=form, status=status)


def body_of(kind: str, model: str) -> bytes:
    if kind == "create":
        return (
            types.CreateModelRequest(session_id="s", model_seq_id=0, base_model="tiny")
            .model_dump_json()
            .encode()
        )
    if kind == "step":
        adam = types.AdamParams(learning_rate=1e-2)
        step = types.OptimStepRequest(adam_params=adam, model_id=model, seq_id=2)
        return step.model_dump_json().encode()
    message = proto.ForwardBackwardRequest(loss_fn="cross_entropy", model_id=model, seq_id=1)
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(5, 25, dtype=np.int32).tobytes()
    for name, values, dtype in (
        ("target_tokens", np.arange(6, 26), proto.DTYPE_INT64),
        ("weights", np.ones(20, np.float32), proto.DTYPE_FLOAT32),
    ):
        tensor = datum.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = values.tobytes(), dtype
        tensor.shape.append(20)
    return message.SerializeToString()


class Drawn:
    """A sampler that ends no request with the seed `LONG` before `release`; with one of the seed
    `BAD` it fails."""

    LONG, BAD = 1, 2
    remote = False

    def __init__(self) -> None:
        self.requests, self.release = dict[str, Request](), threading.Event()

    def keeps(self, name: str) -> bool:
        return True

    def add(self, requests, saved) -> None:
        self.requests |= requests

    def advance(self, *, wait):
        if any(one.seed == self.BAD for one in self.requests.values()):
            raise FloatingPointError("bad")
        for name, one in [*self.requests.items()]:
            if one.seed != self.LONG or self.release.wait(0.01):
                yield name, Answer([], None)
                del self.requests[name]

    def drop(self) -> None:
        self.requests.clear()


def sample(seed: int) -> Request:
    return Request("", np.arange(3, dtype=np.int32), 1, 4, 1.0, 1.0, -1, (), seed)


def started(store: Store, directory, *, slots: int = 4, samplers=None) -> Engine:
    """An engine of two tenants whose requests were accepted before its start."""
    content = dumps({"rank": 4, "attention": True, "mlp": True, "seed": 0})
    for model in TENANTS:
        now = time.time()
        values = {"session": "s", "owner": "o", "created": now, "used": now, "content": content}
        store.insert("models", id=model, **values)
        for seq, kind in enumerate(("create", "compute", "step")):
            given = {"target": model, "seq": seq, "owner": "o", "kind": kind}
            store.accept(f"{model}:{seq}", body=body_of(kind, model), **given)
    one = Layout(make_mesh(devices=jax.devices()[:1]), PRESETS["all"])
    precision = Precision.of("fp32")
    base = Base(tiny.model(), cast(tiny.params(), precision.wire), precision, one)
    files = Files(directory, base_name="tiny")
    return Engine(
        Devices(base, files=files, samplers=lambda load: samplers, microbatch_tokens=1024),
        store=store,
        files=files,
        max_batch=8,
        slots=slots,
        snapshot_seconds=1000,
    )


def norms(store: Store, directory, *, slots: int) -> list[float]:
    """The norms of the gradients of both tenants."""
    engine = started(store, directory, slots=slots)
    while any(store.queued(f"{model}:2") for model in TENANTS):
        time.sleep(0.05)
    engine.close()
    answers = [store.one("SELECT answer FROM requests WHERE id = ?", f"{x}:2") for x in TENANTS]
    return [json.loads(one["answer"])["metrics"]["grad_norm"] for one in answers]


def test_a_batch_that_fails_after_an_answer_applies_nothing_twice(tmp_path, monkeypatch) -> None:
    """Compared with tenants that take turns in one slot."""
    found, most, add = [], [], Pool.add

    def counted(pool, *args):
        add(pool, *args)
        most[-1] = max(most[-1], len(pool.tenants))

    monkeypatch.setattr(Pool, "add", counted)
    for make, slots in ((Store, 1), (Full, 2)):
        directory = tmp_path / make.__name__
        directory.mkdir()
        store = make(directory / "state.sqlite")
        most.append(0)
        found.append(norms(store, directory, slots=slots))
        store.close()
    assert store.failed
    assert most == [1, 2]
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_nothing_waits_for_the_longest_samples(tmp_path) -> None:
    store, samplers = Store(tmp_path / "state.sqlite"), Drawn()
    engine = started(store, tmp_path, samplers=samplers)
    long = engine.draw(sample(Drawn.LONG))
    while not samplers.requests:
        time.sleep(0.01)
    engine.draw(sample(0)).result(250)
    given = {"target": "a", "seq": 3, "owner": "o", "kind": "step"}
    store.accept("a:3", body=body_of("step", "a"), **given)
    work = Work("a:3", "step", "a", 3, decode("step", body_of("step", "a"), engine.limits))
    engine.queue.add(work)
    late = time.monotonic() + 250
    while store.queued("a:3"):
        assert time.monotonic() < late
        time.sleep(0.01)
    assert not long.done()
    bad = engine.draw(sample(Drawn.BAD))  # costs the long one no more than what it had
    samplers.release.set()
    with pytest.raises(FloatingPointError):
        bad.result(250)
    long.result(250)
    engine.close()
    store.close()


def test_a_server_that_cannot_write_answers_ends(tmp_path, monkeypatch, caplog) -> None:
    ended = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    store = Store(tmp_path / "state.sqlite")

    def full(*_, **__):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store, "finish", full)
    try:
        engine = started(store, tmp_path)
        assert ended.wait(250)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "the server ends" in caplog.text
    assert "disk is full" in str(engine.fault)
    assert store.queued("a:0")  # for the next start
    engine.close()
    store.close()


def test_a_request_that_a_restarted_server_refuses_holds_up_none_after_it(tmp_path) -> None:
    store = Store(tmp_path / "state.sqlite")
    # Of another model: without a loss that is known.
    store.accept("b:1", target="b", seq=1, owner="o", kind="compute", body=b"")
    engine = started(store, tmp_path)
    late = time.monotonic() + 250
    while store.queued("b:2"):
        assert time.monotonic() < late
        time.sleep(0.05)
    rows = store.all("SELECT status FROM requests WHERE target = 'b' ORDER BY seq")
    assert [row["status"] for row in rows] == ["done", "failed", "done"]
    engine.close()
    store.close()


def test_a_replay_that_fails_is_begun_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Snapshots, "due", lambda snapshots, model: False)
    store = Store(tmp_path / "state.sqlite")
    engine = started(store, tmp_path)
    while store.queued("a:2") or store.queued("b:2"):
        time.sleep(0.05)
    kind = engine.kind("a")

    def weights() -> list:
        return jax.device_get(jax.tree.leaves(engine._devices.pool(kind).weights("a")))

    expected = weights()
    engine._devices.clear()  # as after a failure; the engine's thread waits
    engine._done.clear()
    step = Pool.step

    def full(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(Pool, "step", full)
    with pytest.raises(RuntimeError, match="no memory"):
        engine._resident("a", kind, keep=set())
    monkeypatch.setattr(Pool, "step", step)
    engine._resident("a", kind, keep=set())
    for mine, other in zip(weights(), expected, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)
    engine.close()
    store.close()
