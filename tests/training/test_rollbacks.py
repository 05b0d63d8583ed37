"""Rollbacks as files: what is decided, carried out, remembered and forgotten."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.diagnostics.alarms.check import Alarm
from jaxrl.tracking.tracker import read_metrics, write_lines
from jaxrl.training import rollbacks
from jaxrl.training.run_directory import ResumeError, check_config
from tests.run_config import run_config


def config(run_dir: Path, **changes: str) -> Config:
    own = {"train.steps": 20, "optimizer.learning_rate": 0.003, "checkpoint.every": 5}
    return run_config("nothing", run_dir=run_dir, **own | changes)


def write_steps(directory: Path, *, upto: int) -> None:
    """Metrics and checkpoints, a checkpoint every 5 steps, as a run writes them behind what is
    there."""
    entries = read_metrics(directory / "metrics.jsonl")
    first = max((e["step"] for e in entries), default=0) + 1
    more = [{"step": step, "time": 1.0, "reward": 0.5} for step in range(first, upto + 1)]
    write_lines(directory / "metrics.jsonl", [*entries, *more])
    for step in range(5, upto + 1, 5):
        (directory / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)


def decide(
    asked: Config, *, at: int, healthy: int, action: str = "rollback_learning_rate"
) -> rollbacks.Rollback:
    """Decides a rollback of the run that lies in the config's run_dir."""
    directory = Path(asked.run_dir)
    to = rollbacks.target(asked, directory / "checkpoints", healthy=healthy)
    assert to is not None
    alarm = Alarm("kl_spike", at, healthy, 0.2, 0.1, "KL 0.2")
    changes = rollbacks.remedy(action, asked)
    return rollbacks.decide(directory, alarm, to=to, config=asked, changes=changes)


@pytest.fixture
def asked(tmp_path):
    """A run of 12 steps that goes back to step 5 with half its learning rate."""
    made = config(tmp_path)
    check_config(tmp_path, made)
    write_steps(tmp_path, upto=12)
    assert decide(made, at=12, healthy=7)[2:] == (
        5,
        "KL 0.2",
        {"optimizer.learning_rate": [0.003, 0.0015]},
        0.2,
        0.1,
        False,
    )
    return made


def files(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file()}


def rolled_back(directory: Path) -> list[dict[str, Any]]:
    entries = read_metrics(directory / "metrics.jsonl")
    return [e for e in entries if "number" in e.get("event", {})]


def test_rollback_is_carried_out_once(asked, tmp_path):
    for _ in range(2):  # a program that was killed does it again
        changed = rollbacks.settle(tmp_path, asked)
        assert changed.optimizer.learning_rate == 0.0015
        assert changed.model_copy(update={"optimizer": asked.optimizer}) == asked
        assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["5"]
        entries = read_metrics(tmp_path / "metrics.jsonl")
        assert [e["step"] for e in entries] == [1, 2, 3, 4, 5, 5]
        assert entries[-1]["event"]["changes"] == {"optimizer.learning_rate": [0.003, 0.0015]}
        removed = read_metrics(tmp_path / "rolled_back_1.jsonl")
        assert [e["step"] for e in removed] == [*range(6, 13)]


def test_killed_rollback_is_completed(asked, tmp_path):
    rollbacks.settle(tmp_path, asked)
    whole = files(tmp_path)
    (found,) = rollbacks.read(tmp_path)
    text = json.dumps([found._replace(done=False)._asdict()])
    (tmp_path / "rollbacks.json").write_text(text)
    (tmp_path / "checkpoints" / "10").mkdir()
    rollbacks.settle(tmp_path, asked)
    assert files(tmp_path) == whole
    assert not (tmp_path / "checkpoints" / "10").exists()


def test_rolled_back_steps_stay_readable(asked, tmp_path):
    """The alarm's own numbers, other events of the rolled-back steps, and their samples."""
    entries = read_metrics(tmp_path / "metrics.jsonl")
    event = {"alarm": "entropy", "at": 8, "action": "pause", "text": "0.1 nats"}
    other = {"step": 8, "time": 1.0, "event": event}
    write_lines(tmp_path / "metrics.jsonl", [*entries[:8], other, *entries[8:]])
    answers = [{"step": step, "prompt": "1+1="} for step in (4, 8, 12)]
    write_lines(tmp_path / "samples.jsonl", answers)
    rollbacks.settle(tmp_path, asked)
    whole = files(tmp_path)
    assert other in read_metrics(tmp_path / "rolled_back_1.jsonl")
    assert read_metrics(tmp_path / "samples.jsonl") == answers[:1]
    assert read_metrics(tmp_path / "rolled_back_1_samples.jsonl") == answers[1:]
    (event,) = rolled_back(tmp_path)
    assert (event["event"]["value"], event["event"]["limit"]) == (0.2, 0.1)
    # A program that was ended before it had noted that this is done does it again.
    (found,) = rollbacks.read(tmp_path)
    text = json.dumps([found._replace(done=False)._asdict()], indent=1)
    (tmp_path / "rollbacks.json").write_text(text)
    rollbacks.settle(tmp_path, asked)
    assert files(tmp_path) == whole
    # A run that is begun again has none of it.
    shutil.rmtree(tmp_path / "checkpoints")
    rollbacks.settle(tmp_path, asked)
    assert not list(tmp_path.glob("rolled_back_*"))


def test_run_resumes_with_old_or_new_values(asked, tmp_path):
    changed = rollbacks.settle(tmp_path, asked)
    assert toml_file.load(Config, file=tmp_path / "config.toml") == changed
    for given in (asked, changed):
        again = rollbacks.settle(tmp_path, given)
        check_config(tmp_path, again)
        assert again == changed
    other = config(tmp_path, optimizer__learning_rate="0.002")
    with pytest.raises(ResumeError, match=r"0\.002, .* changed it from 0\.003 to 0\.0015"):
        rollbacks.settle(tmp_path, other)
    with pytest.raises(ResumeError, match="seed = 0 there and 1 here"):
        check_config(tmp_path, rollbacks.settle(tmp_path, config(tmp_path, seed="1")))


def test_changes_of_earlier_rollbacks_stay(asked, tmp_path):
    first = rollbacks.settle(tmp_path, asked)
    write_steps(tmp_path, upto=12)
    shutil.rmtree(tmp_path / "checkpoints" / "5")
    assert decide(first, at=12, healthy=4).to == 0
    second = rollbacks.settle(tmp_path, asked)
    assert second.optimizer.learning_rate == 0.003 / 4
    assert [(e["step"], e["event"]["number"]) for e in rolled_back(tmp_path)] == [(0, 1), (0, 2)]
    assert toml_file.load(Config, file=tmp_path / "config.toml") == second
    whole = files(tmp_path)
    assert rollbacks.settle(tmp_path, asked) == second
    assert files(tmp_path) == whole


def test_restarted_run_has_no_rollbacks(asked, tmp_path):
    rollbacks.settle(tmp_path, asked)
    shutil.rmtree(tmp_path / "checkpoints")
    assert rollbacks.settle(tmp_path, asked) == asked
    assert rollbacks.read(tmp_path) == []
    assert not (tmp_path / "rolled_back_1.jsonl").exists()


def test_rollback_target_is_the_newest_healthy_checkpoint(tmp_path):
    asked = config(tmp_path)
    (tmp_path / "10").mkdir()
    (tmp_path / "15").mkdir()
    assert rollbacks.target(asked, tmp_path, healthy=14) == 10
    assert rollbacks.target(asked, tmp_path, healthy=9) is None  # that of step 5 is gone
    assert rollbacks.target(asked, tmp_path, healthy=4) == 0  # there never was one


FP16 = {"precision": "bf16_master", "alarms.precision": "fp16_master"}


@pytest.mark.parametrize(
    ("changes", "action", "expected"),
    [
        ({"loss.kl": "0.1"}, "rollback_kl", {"loss.kl": 0.2}),
        ({"loss.kl": "0"}, "rollback_kl", {"loss.kl": 0.001}),
        ({"loss.kl": "0", "reward.kl": "0.1"}, "rollback_kl", {"reward.kl": 0.2}),
        (FP16, "rollback_precision", {"precision": "fp16_master"}),
    ],
)
def test_actions_change_the_documented_keys(tmp_path, changes, action, expected):
    assert rollbacks.remedy(action, config(tmp_path, **changes)) == expected


def test_rollback_scales_a_coefficient_that_has_moved(tmp_path):
    """A checkpoint keeps the coefficient that loss.kl_target steers: the rollbacks made since it
    was written double it, those before have."""
    asked = config(tmp_path, loss__kl=0.1, loss__kl_target=0.5)
    check_config(tmp_path, asked)
    write_steps(tmp_path, upto=12)
    for healthy in (7, 11):
        decide(asked, at=12, healthy=healthy, action="rollback_kl")
        asked = rollbacks.settle(tmp_path, asked)
        write_steps(tmp_path, upto=12)
    assert asked.loss.parameters["kl"] == 0.4
    for step, factor in ((5, 4), (10, 2), (12, 1)):
        coefficients = {"kl": 0.03, "entropy": 0.2}
        rollbacks.scale_coefficients(coefficients, rollbacks.read(tmp_path), step=step)
        assert coefficients == {"kl": 0.03 * factor, "entropy": 0.2}


def test_rollback_to_the_same_precision_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'fp16_master' is alarms\.precision already"):
        rollbacks.remedy(
            "rollback_precision", config(tmp_path, **FP16 | {"precision": "fp16_master"})
        )
