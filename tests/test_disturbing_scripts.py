"""Scripts that disturb runs and judge them: no crash and no NaN passes, and no process is left."""

import importlib
import os
import signal
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def load(monkeypatch):
    """Returns a function that imports a program of scripts/."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def test_sigterm_ends_what_a_script_has_started(load):
    runs, before = load("experiments.runs"), signal.getsignal(signal.SIGTERM)
    try:
        runs.exit_on_sigterm()
        with pytest.raises(SystemExit) as raised:
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert raised.value.code == 128 + signal.SIGTERM
