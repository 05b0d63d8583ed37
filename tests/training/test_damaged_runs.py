"""A damaged file of a run directory: the resume ends with the same files, or names the file."""

import importlib
import random
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxrl.tracking.tracker import read_metrics
from jaxrl.training.run_directory import ResumeError

SCRIPTS = Path(__file__).parents[2] / "scripts"

REFUSED = {
    "config.toml": ("deleted", "emptied", "truncated", "directory", "fifo", "dangling"),
    "rollbacks.json": ("deleted", "emptied", "truncated", "directory", "fifo"),
    "inputs.json": ("emptied", "truncated", "directory", "fifo", "dangling"),
    "metrics.jsonl": ("directory", "fifo", "dangling"),
    "samples.jsonl": ("fifo",),
    "starts.jsonl": ("fifo",),
    "tensorboard": ("fifo",),
    "checkpoints": ("fifo",),
    "checkpoints/3/host/metadata": ("deleted", "emptied", "truncated", "flipped", "fifo"),
    "checkpoints/3/state/_METADATA": ("deleted", "truncated", "fifo"),
    "checkpoints/3/state": ("deleted", "directory"),
    "checkpoints/2/_CHECKPOINT_METADATA": ("fifo",),
}
SAME = {
    "config.toml": ("link",),
    "inputs.json": ("deleted", "link"),
    "checkpoints": ("deleted", "link"),
    "checkpoints/3": ("deleted",),
    "checkpoints/2": ("deleted",),
    "starts.jsonl": ("deleted", "truncated"),
    "model": ("deleted",),
    "model/model.safetensors": ("truncated",),
}


@pytest.fixture(scope="module")
def damaging(tmp_path_factory):
    """The script, and a run that it may damage."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        script = importlib.import_module("damage_loop")
    finally:
        sys.path.remove(str(SCRIPTS))
    directory = tmp_path_factory.mktemp("damage")
    return script, directory, script.write_base(directory / "material", directory / "run")


@pytest.fixture
def run_dir(damaging):
    _, directory, base = damaging
    shutil.rmtree(directory / "run", ignore_errors=True)
    shutil.copytree(base, directory / "run")
    return directory / "run"


def judge(damaging, path):
    script, directory, base = damaging
    return script.judge(directory / "material", directory / "run", base=base, path=path)


def cases(table):
    return [(name, kind) for name, kinds in table.items() for kind in kinds]


# Coroutines that orbax's reader abandons at the first error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("name", "kind"), cases(REFUSED))
def test_resume_names_the_damaged_file(damaging, run_dir, name, kind):
    # Not at random: a config.toml that ends between two keys may read as before.
    early = SimpleNamespace(randrange=lambda end: min(20, end - 1))
    damaging[0].damage(run_dir / name, kind, chance=early)
    outcome, message = judge(damaging, run_dir / name)
    assert outcome == "refused", message


@pytest.mark.parametrize(("name", "kind"), cases(SAME))
def test_resume_gives_the_same_files(damaging, run_dir, name, kind):
    damaging[0].damage(run_dir / name, kind, chance=random.Random(0))
    assert judge(damaging, run_dir / name) == ("same", "")


@pytest.mark.parametrize("rest", [b'{"step": 3, "text": "\xe2\x82', b"7", b'{"step": "3"}', b"{"])
def test_incomplete_last_line_is_dropped(damaging, run_dir, rest, capsys):
    script, directory, base = damaging
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(rest)
    script.resume(directory / "material", run_dir)
    assert "metrics.jsonl: its last line was incomplete and is dropped" in capsys.readouterr().err
    assert read_metrics(run_dir / "metrics.jsonl") == read_metrics(base / "metrics.jsonl")


def test_logs_do_not_affect_the_run(damaging, run_dir):
    """The logs have no digests: reports and alarms read them, nothing that a step computes."""
    shutil.rmtree(run_dir / "checkpoints" / "3")  # to compute that step again
    for name, key in (("metrics.jsonl", '"grad_norm": '), ("samples.jsonl", '"reward": ')):
        text = (run_dir / name).read_text()
        assert key in text
        (run_dir / name).write_text(text.replace(key, f"{key}1"))
    script, directory, base = damaging
    script.resume(directory / "material", run_dir)
    assert script.small_run.differences(run_dir, base) == ["metrics.jsonl", "samples.jsonl"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_damaged_log_line_is_named(damaging, run_dir, name):
    lines = (run_dir / name).read_bytes().splitlines(keepends=True)
    assert len(lines) > 1
    (run_dir / name).write_bytes(b"".join([lines[0][:-3] + b"\n", *lines[1:]]))
    outcome, message = judge(damaging, run_dir / name)
    assert outcome == "refused"
    assert f"{name}:1: not an entry" in message
    assert "Delete this line to resume" in message


def test_lost_metrics_are_reported(damaging, run_dir, capsys):
    script, directory, _ = damaging
    (run_dir / "metrics.jsonl").write_text("")
    script.resume(directory / "material", run_dir)
    expected = "metrics.jsonl ends at step 0, but the checkpoint is at step 3"
    assert expected in capsys.readouterr().err


def test_missing_config_refuses_the_resume(damaging, run_dir):
    script, directory, _ = damaging
    (run_dir / "config.toml").unlink()
    keys = script.small_run.overrides(directory / "material", run_dir, steps=script.STEPS)
    config = script.toml_file.load(
        script.Config, overrides=[*keys.items(), ("optimizer.learning_rate", "0.5")]
    )
    with pytest.raises(ResumeError, match=r"config\.toml is missing\. It is the config"):
        script.train(config)
