import itertools

import pytest

from jaxrl.monitoring.tracking import profile
from jaxrl.monitoring.tracking.profile import Profile, out_of_reach


@pytest.fixture
def calls(monkeypatch):
    """In the place of the profiler, of which a process has one."""
    seen = []
    profiler = profile.jax.profiler
    monkeypatch.setattr(profiler, "start_trace", lambda *_, **__: seen.append("start"))
    monkeypatch.setattr(profiler, "stop_trace", lambda: seen.append("stop"))
    return seen


def traced(calls, steps, *, done, total, directory):
    """The steps of which a trace is made by a run that has done some."""
    found = []
    calls.clear()
    with Profile(directory, steps=steps) as tracing:
        for step in range(done + 1, total + 1):
            tracing.before(step)
            if calls and calls[-1] == "start":
                found.append(step)
    assert calls == ["start", "stop"] * bool(found)
    return found


def test_the_steps_that_are_asked_for_are_traced_and_no_others_and_none_is_said(calls, tmp_path):
    for first, last, done, total in itertools.product(range(1, 6), repeat=4):
        if first <= last and done <= total:
            found = traced(calls, (first, last), done=done, total=total, directory=tmp_path)
            assert found == [s for s in range(done + 1, total + 1) if first <= s <= last]
            note = out_of_reach((first, last), done=done, total=total)
            assert (note is None) == bool(found)
    assert traced(calls, None, done=0, total=5, directory=tmp_path) == []
    assert out_of_reach(None, done=5, total=5) is None


def test_the_note_says_what_to_do():
    note = out_of_reach((10, 12), done=24, total=24)
    assert note is not None
    assert "profile_steps = [10, 12]: nothing is traced now, as the run has done 24 of 24" in note
