"""Servers that are started again, made by hand here, with a clock that the tests move."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from jaxrl.bridge.servers.launch import ServerFailedError
from jaxrl.commands.serve.replicas import Replica


class World:
    """Starts servers at one address: `fails` says why it cannot."""

    def __init__(self) -> None:
        self.url, self.now, self.fails = "http://127.0.0.1:8001", 0.0, ""
        self.starts, self.stops, self.ended, self.well = 0, 0, False, True
        self.notes: list[str] = []

    @contextmanager
    def start(self) -> Iterator["World"]:
        self.starts += 1
        if self.fails:
            raise ServerFailedError(self.fails)
        self.ended, self.well = False, True
        yield self
        self.stops += 1

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


def test_what_has_ended_is_started_again_at_once(world):
    with world.replica() as replica:
        world.watch(replica, 100)
        assert (replica.url, world.starts) == (world.url, 1)
        for times in (2, 3):
            world.ended = True
            world.watch(replica, 100)
            assert (world.starts, world.stops) == (times, times - 1)
    assert world.stops == 3
    assert world.notes == [f"{world.url} is started again in 0 s: killed"] * 2


def test_what_cannot_be_started_is_tried_again_after_growing_waits_and_nothing_is_raised(world):
    with world.replica() as replica:
        world.ended, world.fails = True, "the port is taken"
        world.watch(replica, 300)
        waits = [int(note.split(" in ")[1].split()[0]) for note in world.notes]
        assert waits == [0, 2, 4, 8, 16, 32, 64, 64, 64, 64]
        assert "the port is taken" in world.notes[-1]
        world.fails = ""
        world.watch(replica, 100)
        assert not world.ended
        world.ended = True  # it was well meanwhile
        world.watch(replica, 1)
        assert world.notes[-1].endswith("in 0 s: killed")
    assert world.starts - world.stops == len(waits) - 1  # what has failed was never running


def test_what_ends_as_soon_as_it_is_ready_waits_too(world):
    with world.replica() as replica:
        for _ in range(100):
            world.ended = True
            world.watch(replica, 1)
    assert world.starts < 10


def test_what_hangs_for_minutes_is_started_again_and_what_is_slow_is_not(world):
    with world.replica() as replica:
        for _ in range(3):
            world.well = False
            world.watch(replica, 150)  # such as weights that a slow disk is read for
            world.well = True
            world.watch(replica, 20)
        assert world.starts == 1
        world.well = False
        world.watch(replica, 200)
        assert (world.starts, world.stops, world.well) == (2, 1, True)
        assert "not well for 180 s" in world.notes[0]


def test_the_first_start_must_succeed(world):
    world.fails = "no such model"
    with pytest.raises(ServerFailedError, match="no such model"):
        world.replica()
