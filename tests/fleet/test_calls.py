"""Calls in workers that die: with workers of this process, which need no Ray."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait as wait_for
from types import SimpleNamespace

import pytest

from jaxrl.fleet import workers as module
from jaxrl.fleet.rewards import RemoteReward, Spec
from jaxrl.fleet.worker import _answer
from jaxrl.fleet.workers import Died, Workers

SECONDS = 100.0  # for everything that a test waits for


class Actor:
    """A worker's process: a thread for each call. `die` ends it with all of its calls."""

    def __init__(self, silent: bool = False) -> None:
        self.threads, self.lock = ThreadPoolExecutor(64), threading.Lock()
        self.running: set[Future] = set()
        self.most = self.deaths = self.alone = 0  # deaths with one call are alone
        self.silent, self.asked = silent, list[Future]()  # and those without an answer
        self.call, self.awake = Method(self._call), Method(self._awake)

    def die(self) -> None:
        with self.lock:
            ended, self.running = self.running, set()
            self.deaths += 1
            self.alone += len(ended) == 1
        for answer in ended:
            answer.set_exception(ConnectionError("the process has ended\nat once"))

    def _awake(self) -> Future:
        answer: Future = Future()
        with self.lock:
            self.asked.append(answer)
        if not self.silent:
            self.wake()
        return answer

    def wake(self) -> None:
        with self.lock:
            self.silent, asked, self.asked = False, self.asked, []
        for answer in asked:
            answer.set_result(True)

    def _call(self, request: bytes) -> Future:
        answer: Future = Future()
        with self.lock:
            self.running.add(answer)
            self.most = max(self.most, len(self.running))
        self.threads.submit(self._work, request, answer)
        return answer

    def _work(self, request: bytes, answer: Future) -> None:
        ACTOR.value = self
        found = _answer(request)
        with self.lock:
            alive = answer in self.running
            self.running.discard(answer)
        if alive:
            answer.set_result(found)


class Method:
    def __init__(self, function) -> None:
        self._function = function

    def remote(self, *arguments):
        answer = self._function(*arguments)
        return type("Answer", (), {"future": lambda self: answer})()


ACTOR = threading.local()
FREE = threading.Event()


def double(number: int) -> int:
    time.sleep(0.01)
    return 2 * number


def fail(number: int) -> int:
    raise KeyError(number)


def kill(number: int) -> int:
    ACTOR.value.die()
    return number


class ForeignError(Exception):
    """An error of a user's module, which workers alone import."""

    def __reduce__(self):
        return found_in_workers, ()


def found_in_workers() -> ForeignError:
    if threading.current_thread().name == "workers":  # the learner's
        raise ModuleNotFoundError("No module named 'my_environment'")
    return ForeignError()


def raise_foreign() -> None:
    raise ForeignError


def hold() -> None:
    """Runs until a test sets the event."""
    assert FREE.wait(SECONDS)


@pytest.fixture
def free() -> Iterator[threading.Event]:
    FREE.clear()
    yield FREE
    FREE.set()


def until(reached: Callable[[], object]) -> None:
    late = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < late
        time.sleep(0.001)


def start(count: int, *, slots: int, silent: bool = False) -> tuple[list[Actor], Workers]:
    actors = [Actor(silent) for _ in range(count)]
    workers = Workers(lambda: dict(zip("abcdef", actors, strict=False)), restart=Actor.die)
    workers.together = slots * count
    return actors, workers


def test_calls_survive_those_that_end_their_workers(monkeypatch):
    monkeypatch.setattr(module, "_POLL", 0.02)
    actors, workers = start(3, slots=4)
    calls = [workers.submit(kill if i in (5, 17) else double, i) for i in range(40)]
    assert not wait_for(calls, SECONDS).not_done
    for i, call in enumerate(calls):
        if i in (5, 17):
            assert call.result() == Died("each of 3 workers died (the process has ended)")
        else:
            assert call.result() == 2 * i
    assert max(actor.most for actor in actors) <= 4
    # Each has at most two deaths in company, and then three alone.
    assert sum(actor.deaths for actor in actors) <= 10
    assert sum(actor.alone for actor in actors) >= 6
    assert 6 <= workers.numbers()["fleet/deaths"] <= sum(actor.deaths for actor in actors)


def test_error_is_raised_here_and_a_cancelled_call_is_not_made(free):
    actors, workers = start(1, slots=1)
    with pytest.raises(KeyError, match="7"):
        workers.submit(fail, 7).result(SECONDS)
    first, second = workers.submit(hold), workers.submit(kill, 1)
    until(lambda: actors[0].running)
    assert second.cancel()
    free.set()
    assert first.result(SECONDS) is None
    assert workers.submit(double, 4).result(SECONDS) == 8


def test_a_result_that_cannot_be_read_here_is_the_error_of_its_call():
    _, workers = start(1, slots=1)
    with pytest.raises(RuntimeError, match="No module named 'my_environment'"):
        workers.submit(raise_foreign).result(SECONDS)
    assert workers.submit(double, 4).result(SECONDS) == 8


def test_silent_worker_is_ended_and_its_call_is_made_again(monkeypatch, free):
    for name, value in {"_POLL": 0.02, "_SILENT": 0.3, "_ASKED": 0.05}.items():
        monkeypatch.setattr(module, name, value)
    actors, workers = start(2, slots=1)
    assert workers.submit(double, 1).result(SECONDS) == 2
    call = workers.submit(hold)
    until(lambda: any(actor.running for actor in actors))
    silent = next(actor for actor in actors if actor.running)
    silent.silent = True
    until(lambda: silent.deaths)
    free.set()
    assert call.result(SECONDS) is None
    assert silent.deaths == 1


def test_no_worker_for_long_is_an_error_with_the_last_failure(monkeypatch):
    for name, value in {"_POLL": 0.02, "_PATIENCE": 0.2}.items():
        monkeypatch.setattr(module, name, value)
    _, workers = start(1, slots=1, silent=True)
    with pytest.raises(RuntimeError, match="none of the 1 workers of the fleet has been there"):
        workers.submit(double, 1).result(SECONDS)


def test_workers_may_come_and_go_while_calls_run(monkeypatch, free):
    for name, value in {"_POLL": 0.02, "_FOUND": 0.05}.items():
        monkeypatch.setattr(module, name, value)
    actors, workers = start(1, slots=2)
    assert workers.submit(double, 1).result(SECONDS) == 2
    added = Actor(silent=True)  # it has no place yet, so the whole load stays with the other
    actors.append(added)
    until(lambda: added.asked)
    held = [workers.submit(hold) for _ in range(2)]
    until(lambda: len(actors[0].running) == 2)
    assert workers.count == 1
    calls = [workers.submit(double, i) for i in range(10)]
    added.wake()
    assert [call.result(SECONDS) for call in calls] == [2 * i for i in range(10)]
    assert workers.count == 2
    held.append(workers.submit(hold))
    until(lambda: added.running)
    actors.pop().silent = True  # its call never ends, and is made by the other
    until(lambda: workers.count == 1)
    free.set()
    assert not wait_for(held, SECONDS).not_done
    assert workers.numbers()["fleet/deaths"] == workers.numbers()["fleet/calls"] == 0


def test_removal_is_no_death_of_its_calls_even_if_the_name_is_used_again(monkeypatch, free):
    monkeypatch.setattr(module, "_POLL", 0.02)
    actors, workers = start(1, slots=1)
    call = workers.submit(hold)
    for _ in range(3):
        until(lambda: actors[0].running)
        removed, actors[0] = actors[0], Actor()
        removed.die()
    until(lambda: actors[0].running)
    free.set()
    assert call.result(SECONDS) is None
    assert workers.numbers()["fleet/deaths"] == 0


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 12, 20, 23])
def test_two_workers_take_half_the_time_of_one(count: int) -> None:
    until = [0, 0]  # when each of the two is through, if a completion takes a second

    def submit(function, spec, index, texts, rows, **tries):
        until[until.index(min(until))] += len(texts)
        done = Future()
        done.set_result([float(len(text)) for text in texts])
        return done

    workers = SimpleNamespace(count=2, submit=submit)
    reward = RemoteReward("length", 1.0, False, Spec((), (), 5.0, "reward.path"), 0, workers)
    texts = ["a" * i for i in range(count)]
    assert reward.apply(texts, [{}] * count) == list(range(count))
    assert max(until) == math.ceil(count / 2)
