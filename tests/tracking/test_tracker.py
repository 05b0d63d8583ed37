import json
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxrl.tracking.plots import draw_run
from jaxrl.tracking.tracker import open_tracker, read_metrics


def run(directory, *, start, stop, offset=0.0):
    with open_tracker(directory, start_step=start, total_steps=10) as tracker:
        if start == 0:
            tracker.log(0, {"eval/accuracy": 0.25})
        for step in range(start + 1, stop + 1):
            tracker.log(step, {"reward": step + offset, "kl": float("nan")})


def test_a_resumed_run_has_each_step_once(tmp_path):
    run(tmp_path, start=0, stop=6)
    time.sleep(1)  # TensorBoard reads the files in the order of the seconds in their names
    run(tmp_path, start=4, stop=10, offset=0.5)  # killed after 6, the checkpoint was of step 4
    entries = read_metrics(tmp_path / "metrics.jsonl")
    assert [e["step"] for e in entries] == list(range(11))
    assert [e["reward"] for e in entries[1:]] == [1, 2, 3, 4, 5.5, 6.5, 7.5, 8.5, 9.5, 10.5]
    assert entries[3]["kl"] is None

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(p.step, p.value) for p in events.Scalars("reward")] == [
        (e["step"], e["reward"]) for e in entries[1:]
    ]


def test_only_an_incomplete_last_line_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward": 2}\n{"step": 2, "rew')
    with open_tracker(tmp_path, start_step=2, total_steps=2):
        pass
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "reward": 2}
    ]
    path.write_text('{"st\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:1: not an entry"):
        read_metrics(path)


def test_missing_metrics_have_no_panel(tmp_path):
    entries = [{"step": 0, "eval/accuracy": 0.2}, {"step": 1, "reward": 0.5, "kl": None}]
    draw_run(entries, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_a_terminal_progress_is_plain_lines(tmp_path, capsys):
    run(tmp_path, start=0, stop=10)
    assert "step 10/10: reward 10.000" in capsys.readouterr().err
