"""Every flipped bit in the logs of a run: readers refuse the line, or one entry is another."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxrl.commands.report.collect import alarms, collect
from jaxrl.commands.watch import Tail, view
from jaxrl.diagnostics.alarms.check import check_alarms
from jaxrl.diagnostics.alarms.history import History
from jaxrl.diagnostics.alarms.limits import LIMITS
from jaxrl.tracking.tracker import gap, incomplete_logs, read_metrics

ROLLBACK = {"alarm": "kl_spike", "at": 2, "action": "rollback", "text": "KL", "number": 1, "to": 1}
METRICS = [
    {"step": 1, "time": 1.5, "reward": 0.25, "kl": 0.001, "grad_norm": 1.0, "time/step": 0.5},
    {"step": 1, "time": 1.6, "event": {**ROLLBACK, "changes": {"train.group_size": [4, 8]}}},
    {"step": 2, "time": 2.5, "reward": None, "kl": 0.002, "grad_norm": 1.5},
]
SAMPLES = [
    {"step": step, "prompt": "1+1=", "reward": 1.0, "tokens": ["2", "\u00e9"], "advantages": [0.5]}
    for step in (1, 2)
]
STARTS = [{"step": step, "time": 1.0, "jax": "0.10"} for step in (0, 1)]
LOGS = {"metrics.jsonl": METRICS, "samples.jsonl": SAMPLES, "starts.jsonl": STARTS}


def resume(directory: Path) -> None:
    """Reads what a run reads when it resumes."""
    incomplete_logs(directory)
    read_metrics(directory / "samples.jsonl")
    history, entries = History(), read_metrics(directory / "metrics.jsonl")
    for entry in entries:
        history.add(entry)
    events = (entry["event"] for entry in entries if "event" in entry)
    raised = {e["alarm"]: e["at"] for e in events if e["action"] != "rollback"}
    gap(history, step=2)
    check_alarms(history, LIMITS, raised=raised)


def watch(directory: Path) -> None:
    """Reads and renders what `jaxrl watch` shows."""
    if entries := Tail(directory / "metrics.jsonl").read():
        view(entries, alarms(entries), total=3, now=5.0)


def refuses(read: Callable[[Path], Any], argument: Path, *, naming: Path) -> bool:
    """Tells whether a reader refuses a file by name; any other error is one of the test."""
    try:
        read(argument)
    except ValueError as error:
        return str(error).startswith(f"{naming}:")
    return False


@pytest.mark.parametrize("name", LOGS)
def test_flipped_bit_affects_one_log_line(tmp_path: Path, name: str) -> None:
    for other, entries in LOGS.items():
        (tmp_path / other).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    path, refused, others = tmp_path / name, 0, 0
    content, before = path.read_bytes(), read_metrics(path)
    for place in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        if refuses(read_metrics, path, naming=path):
            refused += 1
            assert refuses(resume, tmp_path, naming=path)
            continue
        resume(tmp_path)
        collect(tmp_path, name="run")
        refuses(watch, tmp_path, naming=path)  # it expects more after an incomplete line
        found = read_metrics(path)
        others += (changed := sum(entry not in before for entry in found))
        assert changed <= 1
        assert len(found) >= len(before) - 2  # the last two became one line, which is incomplete
    assert refused > 100
    assert others > 100
