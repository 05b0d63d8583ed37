"""Workers of a fleet that sleep and count instead of playing: they cost the process little."""

import contextlib
import heapq
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
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
    """The simulated workers and servers: a process that answers each call when it is due, as those
    of a cluster leave the learner's processor to it."""

    def __init__(self, pace: Pace, *, seed: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        process = context.Process(target=simulate, args=(theirs, pace, seed), daemon=True)
        process.start()
        theirs.close()  # so that the end of the process is noticed
        self._answers: dict[int, Future[bytes]] = {}
        self.received = self.sent = self.stored = self._number = 0  # bytes, and calls
        threading.Thread(target=self._receive, name="answers", daemon=True).start()

    def actor(self) -> Any:
        """Returns a worker, with the methods of an actor of Ray that `Workers` calls."""
        return Actor(call=Method(self._call), awake=Method(_awake))

    def close(self) -> None:
        """Ends the process; calls get no answers any more. Call it after the last call."""
        self._pipe.send(None)

    def _call(self, request: bytes) -> "Future[bytes]":
        """Sends a call; one thread makes all of them."""
        self._number += 1
        self._answers[self._number] = answer = Future[bytes]()
        self.received += len(request)
        self._pipe.send((self._number, request))
        return answer

    def _receive(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                number, reply = self._pipe.recv()
                self.sent += len(reply)
                self._answers.pop(number).set_result(reply)


def simulate(pipe: Connection, pace: Pace, seed: int) -> None:
    """Answers calls until None comes."""
    random, served = (
        np.random.default_rng(seed),
        0.0,
    )  # when servers are through with what they have
    due: list[tuple[float, int, bytes]] = []
    while True:
        while pipe.poll(max(0.0, due[0][0] - time.monotonic()) if due else None):
            if (call := pipe.recv()) is None:
                return
            slept = time.monotonic() + pace.environment * random.uniform(0.5, 1.5)
            heapq.heappush(due, (slept, *call))
        _, number, request = heapq.heappop(due)
        _, (_, servers, group) = pickle.loads(request)
        played = play(servers, group, pace=pace, random=random)
        tokens = sum(len(r.completion) for r in played.rollouts)
        served = max(served, time.monotonic()) + tokens / pace.rate
        if (late := served - time.monotonic()) > 0:  # the servers are behind
            time.sleep(late)
        pipe.send((number, pickle.dumps(played)))


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
