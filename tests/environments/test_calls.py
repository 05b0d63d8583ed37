"""Calls of a user's function: in turn, in one thread, each with its own time."""

import threading
import time
from types import SimpleNamespace

from jaxrl.environments.isolation import calls
from jaxrl.environments.isolation.calls import call_each
from tests.environments.deadlines import SECONDS, expire


def test_calls_share_a_thread_not_a_deadline(monkeypatch):
    threads, now = set(), [0.0]
    monkeypatch.setattr(calls, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow(number):
        threads.add(threading.current_thread())
        now[0] += 0.2
        return number

    assert call_each(slow, [(i,) for i in range(4)], timeout=0.5) == [0, 1, 2, 3]
    (thread,) = threads
    assert thread.daemon


def test_every_call_is_made_once(watched):
    free, made, late = threading.Event(), [], []

    def function(number):
        made.append(number)
        if number in (1, 2):
            expire()
            free.wait()
            late.append(number)
        if number == 4:
            raise SystemExit(number)
        return number

    found = call_each(function, [(i,) for i in range(6)], timeout=SECONDS)
    assert made == [*range(6)]
    kinds = [int, TimeoutError, TimeoutError, int, SystemExit, int]
    assert [type(outcome) for outcome in found] == kinds
    free.set()  # what hung ends, and no call follows it
    while len(late) < 2:
        time.sleep(0.01)
    time.sleep(0.05)
    assert made == [*range(6)]


def test_no_calls():
    assert call_each(pow, [], timeout=1.0) == []
