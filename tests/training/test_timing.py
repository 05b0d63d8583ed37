"""The seconds of a step's parts, which are also spans where OpenTelemetry is loaded."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from jaxrl.training import timing
from jaxrl.training.timing import clock


def test_parts_of_a_step_are_spans(monkeypatch):
    seen = []

    @contextmanager
    def span(name):
        seen.append(f"{name} begins")
        try:
            yield
        except ValueError:
            seen.append(f"{name} fails")
            raise
        seen.append(f"{name} ends")

    def tracer(name):
        assert name == "jaxrl"
        return SimpleNamespace(start_as_current_span=span)

    now = iter([1.0, 2.0, 5.0, 9.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", SimpleNamespace(get_tracer=tracer))
    seconds = {}
    with clock(seconds, "time/step"), clock(seconds, "time/learn"):
        pass
    assert seconds == {"time/step": 8.0, "time/learn": 3.0}
    nested = ["time/step begins", "time/learn begins", "time/learn ends", "time/step ends"]
    assert seen == nested
    now = iter([1.0])
    with pytest.raises(ValueError, match="no"), clock(seconds, "time/sample"):
        raise ValueError("no")
    assert seen == [*nested, "time/sample begins", "time/sample fails"]


def test_without_opentelemetry_there_is_only_the_time(monkeypatch):
    monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)
    now = iter([1.0, 2.0, 5.0, 9.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(now))
    seconds = {}
    for _ in range(2):
        with clock(seconds, "time/step"):
            pass
    assert seconds == {"time/step": 5.0}  # both
