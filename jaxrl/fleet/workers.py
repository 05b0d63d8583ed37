"""Calls of functions in the workers of a fleet: the learner's side.

One thread owns the workers. It hands calls to those that answer, and makes the calls of a dead
worker again elsewhere.
"""

import atexit
import contextlib
import functools
import math
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from jaxrl.fleet.engine import connect, import_ray
from jaxrl.fleet.membership import Membership, membership
from jaxrl.fleet.worker import Raised

_NAME = "worker-"
_TRIES = 3  # workers that may die of a call that is alone on them
_SHARED = 2  # deaths of workers that also had other calls, after which a call is made alone
_PATIENCE = 300.0  # seconds without any worker
_POLL = 1.0  # seconds between two looks at the workers
_SILENT = 120.0  # seconds after which a worker that does not answer is ended
_FOUND = 5.0  # seconds between two looks for workers that were added or removed
_ASKED = 20.0  # seconds between two questions to a busy worker


class Died(NamedTuple):
    """The result of a call whose workers died of it."""

    text: str


class _Call:
    """A call until it has its result."""

    def __init__(self, request: bytes, tries: int) -> None:
        self.request, self.tries, self.future = request, tries, Future[Any]()
        self.shared = self.alone = 0  # deaths of its workers, with and without other calls

    @property
    def suspect(self) -> bool:
        return self.shared >= _SHARED or self.alone > 0


class _Worker:
    """A worker as the learner knows it."""

    def __init__(self, actor: Any, *, seen: bool) -> None:
        self.actor, self.seen = actor, seen  # once it has had a place
        self.calls: dict[int, _Call] = {}  # running, by their numbers
        self.ready = False
        self.reserved = False  # for a call that has to be alone
        self.asked: float | None = None  # when it was last asked if it is there, without an answer
        self.next = 0.0  # when it is asked again


class Workers:
    """The workers of a fleet. A call whose worker dies is made again by another one.

    A call that is running when two workers die gets the third one to itself. If three die of it
    alone, its result is `Died`.
    """

    def __init__(
        self, find: Callable[[], Mapping[str, Any]], *, restart: Callable[[Any], None]
    ) -> None:
        """`find` returns the actors that are there now, by their names; they have the methods of
        `fleet.worker.Worker`. `restart` ends one and starts it again."""
        self.together = 0  # calls at the same time, of all workers; each makes at least one
        self._find, self._restart = find, restart
        self._workers = {name: _Worker(actor, seen=True) for name, actor in find().items()}
        self._found = time.monotonic()
        self._waiting: deque[_Call] = deque()
        self._events = SimpleQueue[Callable[[], None]]()
        self._deaths = 0
        self._numbers, self._alive, self._looked = 0, time.monotonic(), 0.0
        self._open, self._failure = True, "none is known"  # the last one of a worker
        self._thread = threading.Thread(target=self._run, name="workers", daemon=True)
        self._thread.start()

    @property
    def count(self) -> int:
        """Number of workers that share the load, at least one: those of the beginning, and those
        added since that have answered; others may still wait for a node."""
        return max(1, sum(worker.seen for worker in self._workers.values()))

    def numbers(self) -> dict[str, float]:
        """Returns the present state as metrics: "fleet/workers", those that answer; "fleet/calls"
        that they make; "fleet/waiting", calls that wait for room; "fleet/deaths" of workers since
        the process started."""
        workers = self._workers.values()
        return {
            "fleet/workers": float(sum(one.ready for one in workers)),
            "fleet/calls": float(sum(len(one.calls) for one in workers)),
            "fleet/waiting": float(len(self._waiting)),
            "fleet/deaths": float(self._deaths),
        }

    def submit(
        self, function: Callable[..., Any], *arguments: Any, tries: int = _TRIES
    ) -> "Future[Any]":
        """Has a top-level function called; returns the future of its result, which is `Died` if
        `tries` workers that had no other call have died of it.

        The future raises what the function raises, and RuntimeError if no worker is there for five
        minutes. A call whose future is cancelled before it begins is not made.
        """
        call = _Call(pickle.dumps((function, arguments)), tries)
        self._events.put(lambda: self._waiting.append(call))
        return call.future

    def close(self) -> None:
        """Ends the thread; calls get no results any more."""
        self._open = False
        self._thread.join(10 * _POLL)

    def _run(self) -> None:
        while self._open:
            try:
                self._events.get(timeout=_POLL)()
                while True:
                    self._events.get_nowait()()
            except Empty:
                pass
            if time.monotonic() - self._looked > _POLL / 2:
                self._look()
            self._hand_out()

    def _hand_out(self) -> None:
        """Begins the calls that workers have room for, in their order."""
        kept: deque[_Call] = deque()
        while self._waiting:
            call = self._waiting.popleft()
            if (worker := self._room(call)) is None:
                kept.append(call)
                if not call.suspect:
                    break  # there is no room for any other
            elif call.future.running() or call.future.set_running_or_notify_cancel():
                self._begin(worker, call)
        self._waiting.extendleft(reversed(kept))

    def _room(self, call: _Call) -> _Worker | None:
        """Returns the worker with the fewest calls; a suspect call gets one without any."""
        ready = [one for one in self._workers.values() if one.ready]
        if not call.suspect:
            slots = max(1, math.ceil(self.together / self.count))
            free = [one for one in ready if not one.reserved and len(one.calls) < slots]
            return min(free, key=lambda one: len(one.calls), default=None)
        chosen = min(ready, key=lambda one: (not one.reserved, len(one.calls)), default=None)
        if chosen is None or chosen.calls:
            if chosen is not None:
                chosen.reserved = True  # it gets no others until it is empty
            return None
        chosen.reserved = True
        return chosen

    def _begin(self, worker: _Worker, call: _Call) -> None:
        self._numbers = number = self._numbers + 1
        worker.calls[number] = call
        answer = worker.actor.call.remote(call.request).future()
        answer.add_done_callback(
            lambda done: self._events.put(lambda: self._end(worker, number, done))
        )

    def _end(self, worker: _Worker, number: int, done: "Future[bytes]") -> None:
        if (call := worker.calls.get(number)) is None:
            return  # it has been given up
        if (error := done.exception()) is not None:
            self._failed(worker, error)
            return
        del worker.calls[number]
        worker.reserved = worker.reserved and bool(worker.calls)
        self._alive = time.monotonic()
        try:
            result = pickle.loads(done.result())
        except Exception as unknown:  # such as a class of the user's, whose module workers import
            result = Raised(RuntimeError(f"what a worker returned cannot be read: {unknown!r}"))
        if isinstance(result, Raised):
            call.future.set_exception(result.error)
        else:
            call.future.set_result(result)

    def _failed(self, worker: _Worker, error: BaseException) -> None:
        """Gives up a worker that ended; of one that was removed, no call is to blame."""
        if worker.ready:
            self._find_changes()
        if any(one is worker for one in self._workers.values()):
            self._lost(worker, f"died ({_first_line(error)})")

    def _lost(self, worker: _Worker, how: str) -> None:
        """Puts the calls of a dead worker first in the queue, and asks until it is back."""
        self._deaths += worker.ready
        calls = self._empty(worker, how)
        for call in reversed(calls):
            if len(calls) > 1:
                call.shared += 1
            else:
                call.alone += 1
            if call.alone >= call.tries:
                call.future.set_result(Died(f"each of {call.tries} workers {how}"))
            else:
                self._waiting.appendleft(call)

    def _empty(self, worker: _Worker, how: str) -> list[_Call]:
        """Takes the calls of a worker that is not there, and returns them."""
        calls = [*worker.calls.values()]
        worker.calls.clear()
        worker.ready = worker.reserved = False
        worker.asked, worker.next = None, time.monotonic() + _POLL
        self._failure = how
        return calls

    def _look(self) -> None:
        """Asks workers if they are there, and ends those that are silent."""
        self._looked = now = time.monotonic()
        if now - self._found > _FOUND:
            self._find_changes()
        for worker in self._workers.values():
            if worker.asked is not None and now - worker.asked > _SILENT and worker.ready:
                self._restart(worker.actor)
                self._lost(worker, f"did not answer for {_SILENT:.0f} s")
            elif worker.asked is None and now >= worker.next and (worker.calls or not worker.ready):
                self._ask(worker)
        if any(worker.ready for worker in self._workers.values()) or not self._waiting:
            self._alive = now
        elif now - self._alive > _PATIENCE:
            error = RuntimeError(
                f"none of the {len(self._workers)} workers of the fleet has been there for "
                f"{_PATIENCE:.0f} s; the last failure: {self._failure:.1000}"
            )
            while self._waiting:
                self._waiting.popleft().future.set_exception(error)

    def _find_changes(self) -> None:
        """Takes new workers in; others make the calls of those that are gone."""
        self._found = time.monotonic()
        with contextlib.suppress(Exception):  # a busy cluster is asked again at the next look
            self._follow(self._find())

    def _follow(self, actors: Mapping[str, Any]) -> None:
        # The name of a worker that is removed may be used again.
        kept = {n: one for n, one in self._workers.items() if actors.get(n) == one.actor}
        gone = [one for name, one in self._workers.items() if name not in kept]
        added = {n: _Worker(a, seen=False) for n, a in actors.items() if n not in kept}
        self._workers = kept | added
        for worker in gone:
            self._waiting.extendleft(reversed(self._empty(worker, "was removed")))

    def _ask(self, worker: _Worker) -> None:
        if worker.asked is not None:
            return
        worker.asked = asked = time.monotonic()
        answer = worker.actor.awake.remote().future()
        answer.add_done_callback(
            lambda done: self._events.put(lambda: self._answered(worker, asked, done))
        )

    def _answered(self, worker: _Worker, asked: float, done: "Future[bool]") -> None:
        if worker.asked != asked:
            return  # of a worker that has been given up
        worker.asked, worker.next = None, time.monotonic() + _ASKED
        if (error := done.exception()) is not None:
            self._failed(worker, error)
        else:
            worker.ready = worker.seen = True


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def worker_name(index: int) -> str:
    """Returns the name under which Ray knows a worker."""
    return f"{_NAME}{index}"


def fleet_workers() -> Workers | None:
    """Connects to the workers of this process's fleet; None without any. Raises RuntimeError if the
    cluster cannot be reached."""
    fleet = membership()
    return None if fleet is None or not fleet.workers else find_workers(fleet)


def fleet_numbers() -> dict[str, float]:
    """Returns `Workers.numbers` of this process's fleet; none without workers."""
    workers = fleet_workers()
    return {} if workers is None else workers.numbers()


@functools.cache
def find_workers(fleet: Membership) -> Workers:
    """Connects to the workers of a fleet; raises RuntimeError if its cluster cannot be reached."""
    ray = import_ray()
    if not ray.is_initialized():
        connect(namespace=fleet.namespace, address=fleet.address)
    made = Workers(
        functools.partial(_actors, fleet.namespace),
        restart=lambda actor: ray.kill(actor, no_restart=False),
    )
    atexit.register(made.close)  # before Ray's own: a call would connect this process again
    return made


def _actors(namespace: str) -> dict[str, Any]:
    """Returns the workers of a fleet by their names."""
    ray, found = import_ray(), dict[str, Any]()
    for name in ray.util.list_named_actors():
        if name.startswith(_NAME):
            with contextlib.suppress(ValueError):  # it has just been removed
                found[name] = ray.get_actor(name, namespace=namespace)
    return found
