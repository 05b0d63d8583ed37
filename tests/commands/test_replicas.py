"""Restarts of fake servers, with a clock that the tests move."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from jaxrl.bridge.servers.launch import ServerFailedError
from jaxrl.commands.serve import replicas
from jaxrl.commands.serve.replicas import Replica, open_replicas


class World:
    """Starts servers at one address; `fails` is the reason why a start fails. Each waits for
    `starting` checks of the others before it is ready."""

    def __init__(self, port: int = 8001, *, starting: int = 0) -> None:
        self.url, self.now, self.fails = f"http://127.0.0.1:{port}", 0.0, ""
        self.starting, self.events = starting, list[str]()
        self.starts, self.stops, self.ended, self.well = 0, 0, False, True
        self.notes: list[str] = []

    @contextmanager
    def start(self) -> Iterator["World"]:
        self.starts += 1
        self.events.append("started")
        if self.fails:
            raise ServerFailedError(self.fails)
        self.ended, self.well = False, True
        try:
            yield self
        finally:
            self.stops += 1

    @property
    def server(self) -> "World":
        return self

    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> "World":
        for _ in range(self.starting):
            meanwhile()
        self.check()
        self.events.append("ready")
        return self

    def check(self) -> None:
        if self.ended:
            raise ServerFailedError("killed")

    def healthy(self) -> bool:
        return self.well

    def replica(self) -> Replica:
        return Replica(self.start, note=self.notes.append, clock=lambda: self.now)

    def watch(self, replica: Replica, seconds: float) -> None:
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            replica.check()


@pytest.fixture
def world() -> World:
    return World()


def test_exited_server_restarts_at_once(world):
    with world.replica() as replica:
        world.watch(replica, 100)
        assert (replica.url, world.starts) == (world.url, 1)
        for times in (2, 3):
            world.ended = True
            world.watch(replica, 100)
            assert (world.starts, world.stops) == (times, times - 1)
    assert world.stops == 3
    assert world.notes == [f"{world.url} failed; restarting in 0 s: killed"] * 2


def test_failed_starts_are_retried_with_growing_waits(world):
    with world.replica() as replica:
        world.ended, world.fails = True, "the port is taken"
        world.watch(replica, 300)
        waits = [int(note.split(" in ")[1].split()[0]) for note in world.notes]
        assert waits == [0, 2, 4, 8, 16, 32, 64, 64, 64, 64]
        assert "the port is taken" in world.notes[-1]
        world.fails = ""
        world.watch(replica, 100)
        assert not world.ended
        world.ended = True  # it was healthy in between
        world.watch(replica, 1)
        assert world.notes[-1].endswith("in 0 s: killed")
    assert world.starts - world.stops == len(waits) - 1  # a failed start never ran


def test_server_that_exits_once_ready_waits_too(world):
    with world.replica() as replica:
        for _ in range(100):
            world.ended = True
            world.watch(replica, 1)
    assert world.starts < 10


def test_only_hanging_server_restarts(world):
    with world.replica() as replica:
        for _ in range(3):
            world.well = False
            world.watch(replica, 150)  # e.g. loading weights from a slow disk
            world.well = True
            world.watch(replica, 20)
        assert world.starts == 1
        world.well = False
        world.watch(replica, 200)
        assert (world.starts, world.stops, world.well) == (2, 1, True)
        assert "no healthy answer for 180 s" in world.notes[0]


def test_first_start_must_succeed(world):
    world.fails = "no such model"
    with pytest.raises(ServerFailedError, match="no such model"):
        world.replica()


@pytest.mark.parametrize("together", [True, False])
def test_replicas_start_together_or_in_turn(together):
    worlds, events = [World(8000), World(8001)], list[str]()
    for world in worlds:
        world.events = events
    with ExitStack() as stack:
        opened = open_replicas((w.replica() for w in worlds), stack, together=together)
        assert [replica.url for replica in opened] == [world.url for world in worlds]
    two = ["started", "started", "ready", "ready"]
    assert events == (two if together else ["started", "ready"] * 2)
    assert [world.stops for world in worlds] == [1, 1]


def test_replica_failing_at_startup_stops_all():
    first, second = World(8000, starting=3), World(8001)

    def begun() -> Iterator[Replica]:
        yield first.replica()
        yield second.replica()
        second.ended = True

    with pytest.raises(ServerFailedError, match="killed"), ExitStack() as stack:
        open_replicas(begun(), stack, together=True)
    assert "ready" not in first.events
    assert (first.stops, second.stops) == (1, 1)


def test_a_start_that_hangs_leaves_no_other_unwatched(monkeypatch):
    """And an interrupt ends it."""
    monkeypatch.setattr(replicas, "_PAUSE", 0.001)
    hanging, other = World(8000), World(8001)
    with hanging.replica() as first, other.replica() as second:
        entered, check = threading.Event(), other.check

        def hang(meanwhile: Callable[[], None]) -> World:
            entered.set()
            while True:
                meanwhile()

        def interrupted() -> None:
            check()
            if other.starts == 2 and entered.is_set():
                raise KeyboardInterrupt

        monkeypatch.setattr(hanging, "wait", hang)
        monkeypatch.setattr(other, "check", interrupted)
        hanging.ended = other.ended = True
        with pytest.raises(KeyboardInterrupt):
            replicas.watch([first, second])
    assert (hanging.starts, other.starts) == (2, 2)
    assert (hanging.stops, other.stops) == (2, 2)
    assert len(hanging.notes) == 1  # of its first failure, none of the interrupt
