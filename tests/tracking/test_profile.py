import itertools

import pytest

from jaxrl.tracking import profile
from jaxrl.tracking.profile import Profile, explain_no_trace


@pytest.fixture
def calls(monkeypatch):
    """Replaces the profiler, of which a process has only one."""
    seen = []
    profiler = profile.jax.profiler
    monkeypatch.setattr(profiler, "start_trace", lambda *_, **__: seen.append("start"))
    monkeypatch.setattr(profiler, "stop_trace", lambda: seen.append("stop"))
    return seen


def traced(calls, steps, *, done, total, directory):
    """Returns the steps that a run traces after `done` steps."""
    found = []
    calls.clear()
    with Profile(directory, steps=steps) as tracing:
        for step in range(done + 1, total + 1):
            tracing.before(step)
            if calls and calls[-1] == "start":
                found.append(step)
    assert calls == ["start", "stop"] * bool(found)
    return found


def test_requested_steps_are_traced(calls, tmp_path):
    for first, last, done, total in itertools.product(range(1, 6), repeat=4):
        if first <= last and done <= total:
            found = traced(calls, (first, last), done=done, total=total, directory=tmp_path)
            assert found == [s for s in range(done + 1, total + 1) if first <= s <= last]
            note = explain_no_trace((first, last), done=done, total=total)
            assert (note is None) == bool(found)
    assert traced(calls, None, done=0, total=5, directory=tmp_path) == []
    assert explain_no_trace(None, done=5, total=5) is None


def test_note_names_steps_and_state():
    note = explain_no_trace((10, 12), done=24, total=24)
    assert note is not None
    assert "profile_steps = [10, 12]: nothing to trace, the run has done 24 of 24" in note
