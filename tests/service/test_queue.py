"""The order of work, and the keys and the state of a service."""

import threading
from pathlib import Path

import numpy as np
import pytest

from jaxrl.commands.tinker import KEY, find_keys
from jaxrl.service import queue as queue_module
from jaxrl.service.queue import Queue
from jaxrl.service.requests import Work
from jaxrl.service.sampling import Request
from jaxrl.service.state import Store
from jaxrl.service.wire import Batch, Datum

DATUM = Datum(np.zeros(2, np.int32), np.zeros((2, 1), np.int32), {}, True)


def compute(model: str, seq: int, *, loss: str = "cross_entropy") -> Work:
    return Work(f"{model}:{seq}", "compute", model, seq, Batch([DATUM], loss, False))


def sample(name: str, seed: int, *, weights: str = "", whole: str = "") -> Work:
    one = Request(weights, np.zeros(2, np.int32), 2, 4, 1.0, 1.0, -1, None, seed, whole=whole)
    return Work(name, "sample", name, 0, one)


def queue_of(*models: str, together: int = 8) -> Queue:
    made = Queue(kind_of=lambda model: "kind", models=together)
    for model in models:
        made.open(model)
    return made


def taken(queue: Queue) -> list[str]:
    found = queue.take(most=8)
    assert found is not None
    return [work.id for work in (*found[0], *found[1])]


def test_a_models_requests_are_done_in_order_and_tenants_share_a_batch():
    queue = queue_of("a", "b")
    queue.add(compute("a", 1))  # the client sends the first of its chunks last
    queue.add(compute("b", 0))
    assert taken(queue) == ["b:0"]
    queue.add(compute("a", 0))
    queue.add(compute("b", 1))
    assert taken(queue) == ["a:0", "a:1", "b:1"]
    queue.add(compute("a", 2, loss="ppo"))
    queue.add(compute("b", 2))
    assert sorted([*taken(queue), *taken(queue)]) == ["a:2", "b:2"]


def test_a_batch_has_no_more_tenants_than_slots():
    queue = queue_of("a", "b", "c", together=2)
    for seq in range(2):
        for model in "abc":
            queue.add(compute(model, seq))
    assert [taken(queue), taken(queue)] == [["a:0", "a:1", "b:0", "b:1"], ["c:0", "c:1"]]


def test_others_do_not_wait_for_a_step_or_a_refused_request():
    queue = queue_of("a", "b")
    queue.add(Work("a:0", "step", "a", 0, {}))
    queue.add(compute("a", 2))
    queue.add(compute("b", 0))
    assert sorted([*taken(queue), *taken(queue)]) == ["a:0", "b:0"]
    queue.drop("a", 1)
    assert taken(queue) == ["a:2"]


def test_a_request_for_samples_waits_for_those_that_come_right_after_it(monkeypatch):
    """The longer the last ones took, for the longer."""
    monkeypatch.setattr(queue_module, "_MOST", 60.0)
    queue = queue_of()
    queue.add(sample("x", 1))
    threading.Timer(0.1, queue.add, [sample("y", 1)]).start()
    found = queue.take(most=4, drawn=1200.0)  # both together
    assert found is not None
    assert [work.id for work in found[1]] == ["x", "y"]
    queue.add(sample("z", 1))
    monkeypatch.setattr(queue_module, "_LONGEST", 0.0)
    assert taken(queue) == ["z"]


def test_requests_join_those_that_are_drawn_in_their_order():
    queue = queue_of("a")
    begun = [sample("w", 1, weights="adapters").payload]
    assert queue.take(most=8, begun=begun) == ([], [])  # without a wait
    queue.add(sample("x", 1))
    queue.add(sample("y", 2, weights="all", whole="all"))
    queue.add(sample("z", 3))
    queue.add(compute("a", 0))
    queue.add(compute("a", 1))

    def found(begun: list[Request], **given: bool) -> list[str]:
        taken = queue.take(most=8, begun=begun, **given)
        assert taken is not None
        return [work.id for work in (*taken[0], *taken[1])]

    assert found(begun, train=False) == ["x"]
    assert found(begun) == ["a:0", "a:1"]
    assert found(begun) == []  # not z, or y would wait for ever
    assert taken(queue) == ["y"]
    begun = [sample("y", 2, weights="all", whole="all").payload]
    queue.add(sample("v", 4, weights="all", whole="all"))
    assert found(begun) == []  # z came first
    queue.cancel("z")
    queue.add(compute("a", 2))
    assert found(begun) == []  # beside all parameters nothing trains
    assert taken(queue) == ["a:2", "v"]


def test_samples_of_one_batch_share_the_base():
    queue = queue_of()
    for work in (
        sample("x", 1),
        sample("y", 1, weights="adapters"),
        sample("z", 2, weights="all", whole="all"),
        sample("w", 3, weights="other"),
        sample("v", 3),
        sample("u", 4),
    ):
        queue.add(work)
    assert taken(queue) == ["x", "y", "w", "v"]
    assert queue.cancel("u") is not None
    assert taken(queue) == ["z"]
    queue.close()
    assert queue.take(most=8) is None


def test_a_key_is_made_once_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(ValueError, match=f"set {KEY}"):
        find_keys("0.0.0.0", tmp_path)
    (made,) = find_keys("127.0.0.1", tmp_path)
    assert made.startswith("tml-")
    assert find_keys("127.0.0.1", tmp_path) == [made]
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(ValueError, match="other users"):
        find_keys("127.0.0.1", tmp_path)
    monkeypatch.setenv(KEY, "tml-a,tml-b")
    assert find_keys("0.0.0.0", tmp_path) == ["tml-a", "tml-b"]
    monkeypatch.setenv(KEY, "secret")
    with pytest.raises(ValueError, match="tml-"):
        find_keys("127.0.0.1", tmp_path)


def test_a_state_has_one_server(tmp_path: Path):
    first = Store(tmp_path / "state.sqlite")
    with pytest.raises(ValueError, match="belongs to a server that runs"):
        Store(tmp_path / "state.sqlite")
    first.close()
    Store(tmp_path / "state.sqlite").close()


def test_a_state_belongs_to_its_model_and_precision(tmp_path: Path):
    """Snapshots of other shapes could not be read, and requests be computed again as before."""
    store, given = Store(tmp_path / "state.sqlite"), {"precision": "fp32", "model": "a"}
    store.claim({**given, "model": "b"})
    store.claim(given)  # nothing was made yet
    store.insert("models", id="m")
    store.claim(given)
    for other, message in (
        ({"precision": "bf16"}, "another precision; precision was 'fp32'"),
        ({"model": "b"}, "another model; start the server as before"),
        ({"second": "c"}, "another second;"),
    ):
        with pytest.raises(ValueError, match=message):
            store.claim(given | other)
    store.close()
