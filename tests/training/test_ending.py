"""How a run ended, as far as its directory tells."""

import fcntl
import os

import jax
import pytest

from jaxrl.core import Hosts
from jaxrl.tracking.tracker import read_metrics, write_lines
from jaxrl.training import run_directory
from jaxrl.training.ending import ending, is_training
from jaxrl.training.run_directory import lock, record_start


def lines(step, *actions):
    alarms = [{"step": step, "time": 1000.0, "event": {"action": action}} for action in actions]
    return [{"step": step, "time": 1000.0, "reward": 0.5}, *alarms]


@pytest.mark.parametrize(
    ("entries", "text", "status"),
    [
        (lines(9), "finished after 9 steps", 0),
        (lines(7), "ended at step 7 of 9: interrupted, killed or failed; rerun", 1),
        ([], "ended before the first step; rerun", 1),
        (lines(7, "log", "pause"), "paused by an alarm at step 7 of 9; rerun", 3),
        (lines(9, "stop"), "stopped by an alarm at step 9 of 9", 4),
        (lines(9, "pause", "log"), "finished", 0),
    ],
)
def test_ending_is_read_from_the_metrics(entries, text, status):
    found = ending(entries, total=9, training=False, now=1001.0)
    assert found.text.startswith(text)
    assert found.status == status
    assert ending(entries, total=9, training=True, now=9000.0) is None
    # Without knowing if a program trains, only what no program would leave behind is an end.
    assert ending(entries, total=9, training=None, now=1001.0) is None
    assert (ending(entries, total=9, training=None, now=9000.0) is None) == (status == 1)


def test_a_start_after_a_pause_in_the_last_step_finishes_the_run():
    for step, started, status in ((9, 999.0, 3), (9, 1000.5, 0), (7, 1000.5, 3)):
        entries = lines(step, "pause")
        found = ending(entries, total=9, training=False, now=1001.0, started=started)
        assert found.status == status


def test_a_run_trains_while_a_program_holds_its_lock(tmp_path):
    run = tmp_path / "run"
    with lock(run, Hosts()):
        record_start(run, step=0, devices=jax.devices())
        assert is_training(str(run)) is True
    assert is_training(str(run)) is False
    (start,) = read_metrics(run / "starts.jsonl")
    write_lines(run / "starts.jsonl", [start | {"host": "elsewhere"}])
    assert is_training(str(run)) is None


def test_a_look_at_a_run_does_not_keep_it_from_starting(tmp_path, monkeypatch):
    descriptor, waits = os.open(tmp_path, os.O_RDONLY), []
    fcntl.flock(descriptor, fcntl.LOCK_SH)

    def glance_ends(seconds):
        waits.append(seconds)
        os.close(descriptor)

    monkeypatch.setattr(run_directory.time, "sleep", glance_ends)
    with lock(tmp_path, Hosts()):
        pass
    assert len(waits) == 1
