import json
import platform
import time

import jax
import pytest
from rich.console import Console

from jaxrl.cli import main
from jaxrl.commands.watch import blocks, view
from jaxrl.core import Hosts
from jaxrl.tracking.tracker import write_lines
from jaxrl.training.run_directory import lock, record_start


def steps(count, *, seconds=3.0, since=1000.0):
    return [
        {"step": s, "time": since + seconds * s, "reward": 0.1 * s, "kl": 0.01, "grad_norm": 2.0}
        for s in range(1, count + 1)
    ]


def seen(entries, alarms=(), *, total=100, now=1031.0):
    console = Console(width=120)
    with console.capture() as capture:
        console.print(view(entries, alarms, total=total, now=now))
    return capture.get()


def test_blocks_span_the_values_shown():
    assert blocks([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert blocks([5, 5]) == "▁▁"
    assert len(blocks(list(range(1000)))) == 40


def test_non_finite_value_is_shown_as_nan():
    broken = [{**e, "grad_norm": None, "kl": None} for e in steps(12)[10:]]
    rows = dict(line.split(maxsplit=1) for line in seen([*steps(10), *broken]).splitlines()[1:])
    assert rows["KL"].split() == ["nan", 10 * "▁" + "xx"]
    assert rows["gradient"].split() == ["norm", "nan", 10 * "▁" + "xx"]
    assert rows["reward"].startswith("1.200")


def test_progress_metrics_and_alarms_are_shown():
    alarm = {"at": 7, "title": "KL spike", "text": "KL 0.3", "action": "rollback", "to": 5}
    shown = seen(steps(10), [alarm])
    for text in ("10/100", "4:30 left", "reward", "1.000", "gradient norm", "2.000"):
        assert text in shown
    assert "step 7: KL spike: KL 0.3; rollback to step 5" in shown


def test_finished_and_silent_runs_are_marked():
    assert "no update for 8:20" in seen(steps(10), now=1530.0)
    assert "done" in seen(steps(100))


def test_run_ended_by_an_alarm_is_marked():
    pause, stop = ({"step": 10, "time": 1030.0, "event": {"action": a}} for a in ("pause", "stop"))
    evaluation = {"step": 10, "time": 1031.0, "eval/accuracy": 0.5}
    assert "paused" in seen([*steps(10), pause])
    assert "paused" in seen([*steps(10), pause, evaluation], now=9031.0)  # one that was due
    assert "stopped" in seen([*steps(10), stop], total=10)
    back = {"step": 10, "time": 1030.0, "event": {"action": "rollback"}}
    assert "left" in seen([*steps(10), pause, back], total=20)


def test_run_without_rewards_has_steps():
    entries = [{"step": s, "time": 1000.0 + 3 * s, "loss": 0.5} for s in range(10, 60, 10)]
    assert "2:30 left" in seen(entries, now=1151.0)


def test_command_reads_the_run_directory(tmp_path, capsys):
    assert main(["watch", str(tmp_path), "--once"]) == 1
    assert "is not a run" in capsys.readouterr().err
    for foreign in ("", "train = 3\n", "[train]\nsteps = 'all'\n"):
        (tmp_path / "config.toml").write_text(foreign)
        assert main(["watch", str(tmp_path), "--once"]) == 1
        assert "config.toml is not the config of a run: it has no" in capsys.readouterr().err
    (tmp_path / "config.toml").write_text("[train\n")
    for command in (["watch", str(tmp_path)], ["fleet", str(tmp_path), "--workers=2"]):
        assert main(command) == 1
        assert f"{tmp_path}/config.toml: not a TOML file" in capsys.readouterr().err
    (tmp_path / "config.toml").write_text("[train]\nsteps = 50\n")
    assert main(["watch", str(tmp_path), "--once"]) == 0
    assert "no step yet" in capsys.readouterr().out
    write_lines(tmp_path / "metrics.jsonl", steps(10, since=time.time() - 30))
    assert main(["watch", str(tmp_path), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "10/50" in shown
    assert "2:00 left" in shown


def test_command_updates_until_interrupted(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.toml").write_text("[train]\nsteps = 50\n")
    since, waited = time.time() - 30, []
    write_lines(tmp_path / "metrics.jsonl", steps(10, since=since))

    def sleep(seconds):
        waited.append(seconds)
        if len(waited) == 2:
            raise KeyboardInterrupt
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(steps(11, since=since)[-1]) + "\n")

    monkeypatch.setattr(time, "sleep", sleep)
    assert main(["watch", str(tmp_path), "--every", "0.5"]) == 0
    assert waited == [0.5, 0.5]
    assert "11/50" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("done", "text", "status"),
    [(50, "finished after 50 steps; model: RUN/model", 0), (10, "ended at step 10 of 50: ", 1)],
)
def test_command_ends_with_the_run(done, text, status, tmp_path, capsys, monkeypatch):
    (tmp_path / "config.toml").write_text("[train]\nsteps = 50\n")
    (tmp_path / "model").mkdir()
    training = lock(tmp_path, Hosts())
    training.__enter__()
    record_start(tmp_path, step=0, devices=jax.devices())
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        write_lines(tmp_path / "metrics.jsonl", steps(done))
        if len(waited) == 2:
            training.__exit__(None, None, None)
        assert len(waited) <= 2

    monkeypatch.setattr(time, "sleep", sleep)
    assert main(["watch", str(tmp_path)]) == status
    assert text.replace("RUN", str(tmp_path)) in capsys.readouterr().out.replace("\n", "")
    assert len(waited) == 2
    assert main(["watch", str(tmp_path)]) == status  # at once


def test_a_run_that_was_resumed_after_a_pause_in_its_last_step_has_finished(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("[train]\nsteps = 50\n")
    event = {"alarm": "held_out", "at": 50, "action": "pause", "text": "", "value": 0.2}
    paused = {"step": 50, "time": time.time() - 9, "event": event}
    write_lines(tmp_path / "metrics.jsonl", [*steps(50), paused])
    write_lines(tmp_path / "starts.jsonl", [{"step": 0, "time": 1.0, "host": platform.node()}])
    assert main(["watch", str(tmp_path)]) == 3
    assert "paused by an alarm at step 50 of 50" in capsys.readouterr().out
    record_start(tmp_path, step=50, devices=jax.devices())
    assert main(["watch", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "finished after 50 steps" in shown
    assert "done" in shown
