"""Scripts that disturb runs and judge them: no crash and no NaN passes, and no process is left."""

import importlib
import os
import signal
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def load(monkeypatch):
    """Returns a function that imports a program of scripts/."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def test_a_crash_is_one_however_long_its_traceback_is(load):
    crashed = load("soaking.judge").crashed
    frames = [f'  File "{i}.py", line 1, in f' for i in range(100)]
    assert crashed(1, ["Traceback (most recent call last):", *frames, "ValueError: x"])
    assert not crashed(1, ["step 3", "error: all servers failed"])
    assert crashed(-signal.SIGSEGV, [])


def test_losses_that_are_no_numbers_deviate(load):
    kills = load("tinker_kills")
    alone = kills.Trained([1.0, 2.0], [-1.0], [])
    assert kills.furthest(alone._replace(logprobs=[-1.5]), alone) == 0.5
    for broken in (alone._replace(losses=[1.0, np.nan]), alone._replace(logprobs=[np.nan])):
        assert not kills.furthest(broken, alone) <= kills.LIMIT


def test_sigterm_ends_what_a_script_has_started(load):
    runs, before = load("experiments.runs"), signal.getsignal(signal.SIGTERM)
    try:
        runs.exit_on_sigterm()
        with pytest.raises(SystemExit) as raised:
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert raised.value.code == 128 + signal.SIGTERM
