import functools

import pytest

from jaxrl.environments.isolation import calls, sandbox, walls


@pytest.fixture
def watched(monkeypatch):
    """Looks at deadlines all the time, and not only when they were to end."""
    remaining = calls.Deadline.remaining
    monkeypatch.setattr(calls.Deadline, "remaining", lambda self: min(0.01, remaining(self)))


@pytest.fixture(params=["bubblewrap", "own"])
def each_wall(request, monkeypatch):
    """Runs a test with bubblewrap, where it works, and without."""
    if request.param == "own":
        monkeypatch.setattr(walls, "find_bubblewrap", lambda: None)
    elif walls.find_bubblewrap() is None:
        pytest.skip("bubblewrap is not installed, or does not work here")


@pytest.fixture
def unhurried(monkeypatch):
    """Gives programs whose time is not limited by the test more than a busy machine takes."""
    patient = functools.partial(sandbox.SandboxLimits, seconds=250.0)
    monkeypatch.setattr(sandbox, "SandboxLimits", patient)
