import errno
import io
import json
import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl.builders.layout import make_layout
from jaxrl.builders.model import load_model
from jaxrl.builders.optimizer import make_optimizer
from jaxrl.cli import COMMANDS, main
from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.core import precision
from jaxrl.learner import policy
from jaxrl.losses.aggregation import token_mean
from jaxrl.losses.objectives import objective
from jaxrl.losses.surrogates import reinforce
from jaxrl.models import huggingface
from jaxrl.training.storage.checkpoint import Checkpoints
from tests import arithmetic
from tests.processes import JAXRL

REQUIRED = ["--model.path", "m", "--data.path", "d", "--reward.path", "exact_match"]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    directory = tmp_path_factory.mktemp("arithmetic")
    arithmetic.write(directory)
    return directory


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"jaxrl {command}" in capsys.readouterr().out


def test_help_of_train_shows_every_key_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in toml_file.keys(Config).items():
        assert f"--{name} " in shown
        assert toml_file.one_line(field.description) in shown
    assert "(default: 0.9,0.95)" in shown
    assert "Each step samples a *rollout batch*" in shown


def test_printed_config_loads_again(tmp_path, capsys):
    changes = ["--train.steps=7", "--loss.kl", "0.001", "--optimizer.clip_norm", "none"]
    assert main(["config", *REQUIRED, *changes]) == 0
    (tmp_path / "a.toml").write_text(printed := capsys.readouterr().out)
    assert tomllib.loads(printed)["train"]["steps"] == 7
    assert main(["config", str(tmp_path / "a.toml")]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["trian"], 2, "unknown command 'trian'"),
        ([], 2, "usage: jaxrl"),
        (["train", "--train.stepz", "3"], 1, "did you mean train.steps?"),
        (["config", *REQUIRED, "--loss.kl"], 1, "loss.kl: the value is missing"),
        (["train", "none.toml"], 1, "none.toml: cannot be read"),
        (["config", *REQUIRED, "--train.group_size", "1"], 1, "set train.group_size to 2 or more"),
        (["config", *REQUIRED, "--loss.name", "gppo"], 1, "did you mean"),
        (["train"], 1, "model.path is missing"),
        (["sft", "--model.path", "m"], 1, "data.path is missing"),
        (["export", "nowhere", "out"], 1, "nowhere/config.toml: cannot be read"),
    ],
)
def test_errors_are_one_line_with_a_status(argv, status, message, capsys):
    assert main(argv) == status
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_ctrl_c_leaves_no_traceback(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxrl.commands.config.main", interrupt)
    assert main(["config"]) == 130
    assert capsys.readouterr().err == "jaxrl config: interrupted\n"


def test_a_users_function_cannot_end_the_program_unseen(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("import sys\nsys.exit(0)\n")
    path = f"{tmp_path}/mine.py:reward"
    assert main(["config", *REQUIRED, "--reward.path", path]) == 1
    assert f"reward.path = {path!r}: importing" in capsys.readouterr().err
    assert main(["config", *REQUIRED, "--loss", "sys:exit"]) == 1
    assert "loss.name = 'sys:exit'" in capsys.readouterr().err


def test_an_exit_in_a_command_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr("jaxrl.commands.config.main", lambda _: sys.exit(0))
    assert main(["config"]) == 1
    assert "test_cli.py:" in (error := capsys.readouterr().err)
    assert "ended the program by exit(0)" in error


def test_a_full_disk_is_one_message(monkeypatch, capsys, caplog):
    def train(config):
        try:
            raise ValueError(f"zarr: {os.strerror(errno.ENOSPC)} [os_error_code='28']")
        except ValueError as error:
            logging.getLogger("absl").exception("a thread of orbax failed")
            logging.getLogger("asyncio").error("never retrieved", exc_info=error)
            raise RuntimeError("the checkpoint cannot be written") from error

    monkeypatch.setattr("jaxrl.training.supervised.sft.finetune", train)
    assert main(["sft", "--model.path", "m", "--data.path", "d", "--run_dir", "r"]) == 1
    assert "the disk is full; make room, then rerun the same command" in (
        error := capsys.readouterr().err
    )
    assert error.count("\n") == 1
    assert "'r'" in error
    assert caplog.records == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("argv", [["config", *REQUIRED], ["losses", "grpo"]])  # long, and short
def test_output_that_cannot_be_written_is_an_error(argv):
    command = [*JAXRL, *argv]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "No space left on device" in ended.stderr


def test_eval_and_generate_agree(material, tmp_path, capsys, monkeypatch):
    common = ["--model.path", f"{material}/untrained", "--precision", "fp32"]
    length = ["--sampling.max_tokens", "6"]
    completions = tmp_path / "completions.jsonl"
    data = ["--data.path", "x.jsonl", "--data.eval_path", f"{material}/held_out.jsonl"]
    reward = ["--reward.path", "numeric_match", "--completions", str(completions)]
    assert main(["eval", *common, *length, *data, *reward]) == 0
    out = capsys.readouterr().out
    assert "8 prompts, 0 too long and skipped\nheld-out accuracy: " in out

    rows = [json.loads(line) for line in completions.read_text().splitlines()]
    asked = [
        json.loads(line)["prompt"]
        for line in (material / "held_out.jsonl").read_text().splitlines()
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(asked)))
    assert main(["generate", *common, *length, "--greedy"]) == 0
    out = capsys.readouterr().out
    for prompt, row in zip(asked, rows, strict=True):
        assert f"{prompt}\n{row['completion']}" in out


def test_export_writes_the_requested_checkpoint(material, tmp_path, capsys):
    required = [("model.path", f"{material}/untrained"), ("data.path", "d")]
    config = toml_file.load(
        Config, overrides=[*required, ("reward.path", "exact_match"), ("precision", "fp32")]
    )
    (tmp_path / "config.toml").write_text(toml_file.dumps(config))
    model, params = load_model(
        config.model.path, layout=make_layout(config.mesh), dtype=np.dtype(np.float32)
    )
    made = policy.make_learner(
        model,
        objective(reinforce(), token_mean),
        optimizer=make_optimizer(
            config.optimizer, total_steps=config.optimizer_steps, specs=model.specs
        ).transformation,
        precision=precision.parse("fp32"),
        rows_per_microbatch=1,
    )
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    scaled = {step: jax.tree.map(lambda x, s=step: x * s, params) for step in (2, 3)}
    for (step, weights), accuracy in zip(scaled.items(), (0.9, 0.1), strict=True):
        checkpoints.save(step, made.init(weights), host={}, metric=accuracy)
    checkpoints.close()

    for name, step in (("latest", 3), ("best", 2), ("2", 2)):
        out = tmp_path / name
        assert main(["export", str(tmp_path), str(out), "--step", name, "--dtype", "f32"]) == 0
        assert capsys.readouterr().out == f"step {step}: {out}\n"
        _, exported = huggingface.load(out, dtype=None)
        jax.tree.map(np.testing.assert_array_equal, exported, scaled[step])
        assert (out / "tokenizer.json").exists()
    assert main(["export", str(tmp_path), str(tmp_path / "x"), "--step", "9"]) == 1
    assert "there is no checkpoint" in capsys.readouterr().err
