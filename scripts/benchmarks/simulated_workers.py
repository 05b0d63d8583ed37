"""Workers of a fleet that sleep and count instead of playing: they cost the process little."""

import heapq
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from jaxrl.core import Rollout
from jaxrl.training.rollouts.groups import Group, Played, Servers

VERSION = "version"  # the key under which `Servers.used` names the policy's version


class Pace(NamedTuple):
    """The times of a simulated group."""

    environment: float  # mean seconds that its episodes sleep; a group takes half to 1.5 times this
    rate: float  # tokens/s of all servers together
    tokens: int  # mean tokens of a completion; it has half to 1.5 times this
    vocabulary: int


class Field:
    """The simulated workers and servers: one thread that answers each call when it is due."""

    def __init__(self, pace: Pace, *, seed: int = 0) -> None:
        self._pace, self._random = pace, np.random.default_rng(seed)
        self._due: list[tuple[float, int, Future[bytes], bytes]] = []
        self._changed, self._number = threading.Condition(), 0
        self._served = 0.0  # when the servers are through with what they have
        self._open = True
        self.received = self.sent = self.stored = self.groups = 0  # bytes and groups
        self.thread = threading.Thread(target=self._run, name="simulation", daemon=True)
        self.thread.start()

    def actor(self) -> Any:
        """Returns a worker, with the methods of an actor of Ray that `Workers` calls."""
        return Actor(call=Method(self._call), awake=Method(_awake))

    def close(self) -> None:
        """Ends the thread; calls get no answers any more."""
        with self._changed:
            self._open = False
            self._changed.notify()
        self.thread.join()

    def _call(self, request: bytes) -> "Future[bytes]":
        answer, pace = Future[bytes](), self._pace
        with self._changed:
            self._number += 1
            self.received += len(request)
            slept = time.monotonic() + pace.environment * self._random.uniform(0.5, 1.5)
            heapq.heappush(self._due, (slept, self._number, answer, request))
            self._changed.notify()
        return answer

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._open and (not self._due or self._due[0][0] > time.monotonic()):
                    left = self._due[0][0] - time.monotonic() if self._due else None
                    self._changed.wait(left)
                if not self._open:
                    return
                _, _, answer, request = heapq.heappop(self._due)
            _, (_, servers, group) = pickle.loads(request)
            played = play(servers, group, pace=self._pace, random=self._random)
            tokens = sum(len(r.completion) for r in played.rollouts)
            self._served = max(self._served, time.monotonic()) + tokens / self._pace.rate
            reply = pickle.dumps(played)
            self.sent += len(reply)
            self.groups += 1
            if (late := self._served - time.monotonic()) > 0:  # the servers are behind
                time.sleep(late)
            answer.set_result(reply)


def play_asleep(setup: bytes, servers: Servers, group: Group) -> Played:
    """Sleeps as long as a group takes, and makes it up; `setup` is a pickled `Pace`."""
    pace, random = pickle.loads(setup), np.random.default_rng(group.number)
    time.sleep(pace.environment * random.uniform(0.5, 1.5))
    return play(servers, group, pace=pace, random=random)


def play(servers: Servers, group: Group, *, pace: Pace, random: np.random.Generator) -> Played:
    """Makes up a group, with rewards of 0 or 1."""
    rollouts = []
    for _ in range(group.size):
        size = int(pace.tokens * random.uniform(0.5, 1.5))
        reward = float(random.integers(2))
        rollouts.append(
            Rollout(
                prompt=group.example.tokens,
                completion=random.integers(0, pace.vocabulary, size, np.int32),
                logprobs=-random.random(size, np.float32),
                action_mask=np.ones(size, bool),
                version=np.full(size, servers.used[VERSION], np.int32),
                group=group.number,
                reward=reward,
                components=(reward,),
            )
        )
    return Played(rollouts, [])


def _awake() -> "Future[bool]":
    answer = Future[bool]()
    answer.set_result(True)
    return answer


class Actor(NamedTuple):
    """A worker, as `Workers` calls it."""

    call: "Method"
    awake: "Method"


class Method(NamedTuple):
    """A method of a worker."""

    function: Callable[..., Future[Any]]

    def remote(self, *arguments: Any) -> "_Answer":
        """Begins a call."""
        return _Answer(self.function(*arguments))


class _Answer(NamedTuple):
    answer: Future[Any]

    def future(self) -> Future[Any]:
        return self.answer
