"""Rewards that the workers of a fleet compute: the learner's side."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl.fleet.engine import connect, import_ray
from jaxrl.fleet.membership import Membership
from jaxrl.fleet.worker import Loaded, Spec

_PARTS = 4  # of the completions for each worker, so that a slow one holds up little
_TRIES = 3  # deaths of workers by a call that cannot be divided
_PATIENCE = 300.0  # seconds without any worker
_POLL = 1.0  # seconds between two looks at a worker that is away
_SLACK = 60.0  # seconds beyond a call's own deadline before its worker is ended


class Call(NamedTuple):
    """A call of a worker's method."""

    method: str
    arguments: tuple[Any, ...]
    seconds: float  # after which it counts as hung
    tries: int = _TRIES  # workers that it may end before it is given up


class Died(NamedTuple):
    """The result of a call whose workers all died of it."""

    text: str


def worker_name(index: int) -> str:
    """Returns the name under which Ray knows a worker."""
    return f"worker-{index}"


class RemoteReward(NamedTuple):
    """One term of the reward, whose function the workers call."""

    loaded: Loaded
    spec: Spec
    index: int  # of its function in the spec
    workers: "Workers"

    @property
    def name(self) -> str:
        """Its name in metrics and messages."""
        return self.loaded.name

    @property
    def weight(self) -> float:
        """Its factor in the sum."""
        return self.loaded.weight

    @property
    def takes_all(self) -> bool:
        """True if its function takes all completions at once."""
        return self.loaded.takes_all

    def apply(
        self, completions: Sequence[str], examples: Sequence[Mapping[str, Any]]
    ) -> list[float | str]:
        """Returns as `Reward.apply`, in the order of the completions. A completion that ends every
        worker that scores it has failed.

        Raises:
          RuntimeError: if no worker is there for five minutes.
        """
        count = len(completions)
        parts = 1 if self.takes_all else min(count, _PARTS * self.workers.count)
        ends = [count * i // parts for i in range(parts + 1)] if count else []
        found: list[float | str] = []
        pieces = [slice(*pair) for pair in itertools.pairwise(ends)]
        calls = [self._call(completions[piece], examples[piece]) for piece in pieces]
        for piece, result in zip(pieces, self.workers.results(calls), strict=True):
            if isinstance(result, Died) and not self.takes_all and piece.stop - piece.start > 1:
                alone = [slice(i, i + 1) for i in range(piece.start, piece.stop)]
                again = [self._call(completions[one], examples[one]) for one in alone]
                for single in self.workers.results(again):
                    found += [single.text] if isinstance(single, Died) else single
            elif isinstance(result, Died):
                found += [result.text] * (piece.stop - piece.start)
            else:
                found += result
        return found

    def _call(self, completions: Sequence[str], examples: Sequence[Mapping[str, Any]]) -> Call:
        rows = [dict(example) for example in examples]
        seconds = _SLACK + self.spec.timeout * (1 if self.takes_all else max(1, len(rows)))
        # One of several completions may be to blame, and each is then tried alone.
        tries = _TRIES if self.takes_all or len(rows) == 1 else 1
        return Call("apply", (self.spec, self.index, list(completions), rows), seconds, tries)


class Workers:
    """The workers of a fleet. A call whose worker dies is made again by another one."""

    def __init__(self, fleet: Membership) -> None:
        """Connects to the fleet's cluster; raises RuntimeError if it cannot be reached."""
        self._ray, self.count = import_ray(), fleet.workers
        if not self._ray.is_initialized():
            connect(namespace=fleet.namespace, address=fleet.address)
        self.failure = "none is known"  # the last one of a worker
        self._lock = threading.Lock()
        self._idle: deque[Any] = deque()
        self._asked: dict[Any, Any] = {}  # workers that are away, by the answer that is waited for
        self._resting: deque[tuple[float, Any]] = deque()  # lost ones, and when to ask them again
        for index in range(self.count):
            self._ask(self._ray.get_actor(worker_name(index), namespace=fleet.namespace))

    def load_rewards(
        self,
        paths: Sequence[str],
        weights: Sequence[float] = (),
        *,
        timeout: float = 60.0,
        key: str = "reward.path",
    ) -> list[RemoteReward]:
        """Has the reward functions that a config names loaded by a worker, and by the others when
        they are first called; raises as `load_rewards`."""
        spec = Spec(tuple(paths), tuple(weights), timeout, key)
        (loaded,) = self.results([Call("load", (spec,), _PATIENCE)])
        if isinstance(loaded, Died):
            raise ValueError(f"{key} = {list(paths)}: {loaded.text} while it imported them")
        if isinstance(loaded, str):
            raise ValueError(loaded)
        return [RemoteReward(Loaded(*one), spec, i, self) for i, one in enumerate(loaded)]

    def results(self, calls: Sequence[Call]) -> list[Any]:
        """Makes calls, one at a time on each worker; returns their results in order.

        Raises:
          RuntimeError: if no worker is there for five minutes.
        """
        with self._lock:
            return _Round(self._ray, self, calls).finish()

    def take(self) -> Any | None:
        """Returns an idle worker; None if there is none."""
        return self._idle.popleft() if self._idle else None

    def give(self, worker: Any) -> None:
        """Takes back a worker that has answered."""
        self._idle.append(worker)

    def lost(self, worker: Any) -> None:
        """Takes back a worker that has died, and asks until it is back."""
        self._resting.append((time.monotonic() + _POLL, worker))

    def wait(self, running: Sequence[Any]) -> list[Any]:
        """Waits a moment for one of the answers `running` or for a worker that is away; returns the
        answers that are there."""
        while self._resting and self._resting[0][0] <= time.monotonic():
            self._ask(self._resting.popleft()[1])
        awaited = [*running, *self._asked]
        if not awaited:
            time.sleep(_POLL)
            return []
        ready, _ = self._ray.wait(awaited, num_returns=1, timeout=_POLL)
        for answer in ready:
            if (worker := self._asked.pop(answer, None)) is not None:
                try:
                    self._ray.get(answer)
                    self.give(worker)
                except self._ray.exceptions.RayActorError as error:
                    self.failure = str(error)
                    self.lost(worker)
        return [answer for answer in ready if answer in running]

    def _ask(self, worker: Any) -> None:
        self._asked[worker.awake.remote()] = worker


class _Round:
    """Some calls, until each has its result."""

    def __init__(self, ray: Any, workers: Workers, calls: Sequence[Call]) -> None:
        self._ray, self._workers, self._calls = ray, workers, calls
        self._waiting = deque(range(len(calls)))
        self._running: dict[Any, tuple[Any, int, float]] = {}
        self._deaths = [0] * len(calls)
        self._found: dict[int, Any] = {}

    def finish(self) -> list[Any]:
        alive = time.monotonic()
        while len(self._found) < len(self._calls):
            while self._waiting and (worker := self._workers.take()) is not None:
                self._begin(worker, self._waiting.popleft())
            if self._running:
                alive = time.monotonic()
            elif time.monotonic() - alive > _PATIENCE:
                raise RuntimeError(
                    f"none of the {self._workers.count} workers of the fleet has been there for "
                    f"{_PATIENCE:.0f} s; the last failure: {self._workers.failure:.1000}"
                )
            for answer in self._workers.wait(list(self._running)):
                self._end(answer)
            self._end_hung()
        return [self._found[i] for i in range(len(self._calls))]

    def _begin(self, worker: Any, index: int) -> None:
        call = self._calls[index]
        answer = getattr(worker, call.method).remote(*call.arguments)
        self._running[answer] = worker, index, time.monotonic() + call.seconds

    def _end(self, answer: Any) -> None:
        worker, index, _ = self._running.pop(answer)
        try:
            self._found[index] = self._ray.get(answer)
        except self._ray.exceptions.RayActorError:
            self._workers.lost(worker)
            self._count_death(index, "died")
        else:
            self._workers.give(worker)

    def _end_hung(self) -> None:
        now = time.monotonic()
        for answer, (worker, index, until) in list(self._running.items()):
            if now > until:
                del self._running[answer]
                self._ray.kill(worker, no_restart=False)
                self._workers.lost(worker)
                self._count_death(index, f"did not answer in {self._calls[index].seconds:.0f} s")

    def _count_death(self, index: int, how: str) -> None:
        self._deaths[index] += 1
        if self._deaths[index] < (tries := self._calls[index].tries):
            self._waiting.append(index)
        else:
            self._found[index] = Died(f"each of {tries} workers {how}")
