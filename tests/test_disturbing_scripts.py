"""Scripts that disturb runs and judge them: no crash and no NaN passes, and no process is left."""

import functools
import importlib
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks at /proc")
def test_processes_are_found_beside_one_whose_command_is_no_text(load):
    served = load("experiments.served")
    waits, word = b"echo\nread\n", f"of {os.getpid()}"  # until its input is closed
    begin = functools.partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with (
        begin([b"bash", b"-c", waits, b"\xff"]) as odd,
        begin(["bash", "-c", waits, word]) as sought,
    ):
        try:
            for process in (odd, sought):  # a process has its words a moment after Popen returns
                process.stdout.readline()
            assert served.processes("bash", word) == [sought.pid]
        finally:
            odd.kill()
            sought.kill()


def test_a_resume_that_hangs_is_an_error(load, monkeypatch, tmp_path):
    loop = load("kill_loop")
    monkeypatch.setattr(loop, "PATIENCE", 0.1)
    command = ["bash", "-c", "echo $$; exec sleep 300"]
    kept = {"chance": SimpleNamespace(random=lambda: 1.0), "longest": 1.0, "ports": []}
    for kills in (1, 0):  # before a kill, and after the last one
        with pytest.raises(RuntimeError, match=r"no further within 0 s; see .*run\.log"):
            loop.disturb(command, tmp_path / "run", kills=kills, **kept)
    for process in map(int, (tmp_path / "run.log").read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_sigterm_ends_what_a_script_has_started(load):
    runs, before = load("experiments.runs"), signal.getsignal(signal.SIGTERM)
    try:
        runs.exit_on_sigterm()
        with pytest.raises(SystemExit) as raised:
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert raised.value.code == 128 + signal.SIGTERM
