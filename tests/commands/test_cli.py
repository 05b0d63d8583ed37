import asyncio
import errno
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import tensorstore

from jaxrl.cli import COMMANDS, main
from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.core import plugins
from jaxrl.environments.rewards import builtin
from tests.processes import JAXRL

REQUIRED = ["--model.path", "m", "--data.path", "d", "--reward.path", "exact_match"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"jaxrl {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "option"),
    [("eval", o) for o in ("completions", "json", "out")]
    + [(c, "out") for c in ("generate", "report", "bench")],
)
def test_unusable_files_are_refused_before_the_work(command, option, tmp_path, capsys):
    (tmp_path / "file").touch()
    for place, said in ((tmp_path, "is a directory"), (tmp_path / "file" / "x", "File exists")):
        with pytest.raises(SystemExit) as end:
            main([command, f"--{option}", str(place)])
        assert end.value.code == 2
        shown = capsys.readouterr().err
        assert f"argument --{option}: '{place}'" in shown
        assert said in shown


def test_a_file_without_permission_is_refused_before_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(SystemExit):
        main(["report", "--out", str(tmp_path / "page.html")])
    assert f"page.html': no permission to write {tmp_path}" in capsys.readouterr().err


def test_full_help_shows_every_key(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        main(["train", "--help", "all"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in toml_file.keys(Config).items():
        assert f"--{name} " in shown
        assert toml_file.one_line(field.description) in shown
    assert "(default: 0.9,0.95)" in shown
    assert "Each step samples a *rollout batch*" in shown


def test_short_help_fits_one_screen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    overview = capsys.readouterr().out
    assert overview.count("\n") <= 40
    for name, field in Config.model_fields.items():
        if name in toml_file.keys(Config):
            assert name in overview
            continue
        assert f"  {name} " in overview
        with pytest.raises(SystemExit):
            main(["train", "--help", name])
        shown = capsys.readouterr().out
        assert all(f"--{name}.{key} " in shown for key in field.annotation.model_fields)
        assert "--seed" not in shown


def test_help_shows_several_tables(capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", "--help", "data", "model"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "--data.prompt_key " in shown
    assert "--model.path " in shown
    assert "--train.steps " not in shown


@pytest.mark.parametrize(("options", "level"), [((), "3"), (("--verbose",), None)])
def test_xlas_own_log_is_shown_on_demand(options, level, monkeypatch, capsys):
    """Level 3 leaves only what ends the process: no box about a slow compilation."""
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    with pytest.raises(SystemExit):
        main(["train", *options, "--help"])
    assert os.environ.get("TF_CPP_MIN_LOG_LEVEL") == level


def test_help_names_the_nearest_table(capsys):
    with pytest.raises(SystemExit) as end:
        main(["train", "--help", "smapling"])
    assert end.value.code == 2
    assert "did you mean sampling?" in capsys.readouterr().err


def test_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxrl {metadata.version('jaxrl')}\n"


def test_python_runs_the_package():
    ended = subprocess.run([sys.executable, "-m", "jaxrl", "--help"], capture_output=True)
    assert ended.returncode == 0
    assert ended.stdout.startswith(b"usage: jaxrl COMMAND")


def test_printed_config_loads_again(tmp_path, capsys):
    changes = ["train.steps=7", "--loss.kl", "0.001", "--optimizer.clip_norm", "none"]
    changes += ["--loss", "grpo", "--loss.name", "dapo"]  # the last one counts
    assert main(["config", *REQUIRED, *changes]) == 0
    (tmp_path / "a.toml").write_text(printed := capsys.readouterr().out)
    assert tomllib.loads(printed)["train"]["steps"] == 7
    assert tomllib.loads(printed)["loss"]["name"] == "dapo"
    assert main(["config", str(tmp_path / "a.toml")]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["trian"], 2, "unknown command 'trian'; did you mean train?"),
        ([], 2, "usage: jaxrl"),
        (["train", "--train.stepz", "3"], 1, "did you mean train.steps?"),
        (["config", *REQUIRED, "--loss.kl"], 1, "loss.kl: the value is missing"),
        (["train", "train.stepz=3"], 1, "did you mean train.steps?"),
        (["train", "none.toml"], 1, "none.toml: cannot be read"),
        (["config", *REQUIRED, "--train.group_size", "1"], 1, "set train.group_size to 2 or more"),
        (["config", *REQUIRED, "--loss.name", "gppo"], 1, "did you mean"),
        (["train"], 1, "model.path is missing"),
        (["sft", "--model.path", "m"], 1, "data.path is missing"),
        (["export", "nowhere", "out"], 1, "nowhere is not a run: there is no such directory; name"),
    ],
)
def test_errors_are_one_line_with_a_status(argv, status, message, capsys):
    assert main(argv) == status
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_init_writes_a_run_that_loads(tmp_path, monkeypatch, capsys):
    assert main(["init", str(tmp_path / "first")]) == 0
    monkeypatch.chdir(tmp_path / "first")
    config = toml_file.load(Config, file="config.toml")
    *_, reward = config.reward.path
    score = plugins.load_function(reward, builtin=builtin, key="reward.path")
    rows = [json.loads(line) for line in Path(config.data.path).read_text().splitlines()]
    for row in rows:
        assert row[config.data.prompt_key]
        assert score(f"It is {row['answer']}.", row) == 1
        assert score(f"It is 1{row['answer']}.", row) == 0
        assert score("I do not know.", row) == 0
    assert len({row["answer"] for row in rows}) == len(rows)  # no answer is right for two
    assert main(["init"]) == 1
    assert "config.toml, rewards.py, data.jsonl: exists" in capsys.readouterr().err


def test_bash_completes_commands_and_keys(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "jaxrl.bash").write_text(capsys.readouterr().out)

    def completions(*words):
        line = " ".join(words)
        script = f"""source {tmp_path}/jaxrl.bash; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}
        _shtab_jaxrl; echo "${{COMPREPLY[@]}}" """
        return subprocess.check_output(["bash", "-c", script], text=True).split()

    assert completions("jaxrl", "tra") == ["train"]
    assert completions("jaxrl", "train", "--optimizer.l") == ["--optimizer.learning_rate"]
    assert completions("jaxrl", "export", "--st") == ["--step"]


def test_ctrl_c_leaves_no_traceback(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxrl.commands.config.main", interrupt)
    assert main(["config"]) == 130
    assert capsys.readouterr().err == "jaxrl config: interrupted\n"


def test_exit_of_a_users_function_is_reported(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("import sys\nsys.exit(0)\n")
    path = f"{tmp_path}/mine.py:reward"
    assert main(["config", *REQUIRED, "--reward.path", path]) == 1
    assert f"reward.path = {path!r}: importing" in capsys.readouterr().err
    assert main(["config", *REQUIRED, "--loss", "sys:exit"]) == 1
    assert "loss.name = 'sys:exit'" in capsys.readouterr().err


def test_exit_in_a_command_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr("jaxrl.commands.config.main", lambda _: sys.exit(0))
    assert main(["config"]) == 1
    assert "test_cli.py:" in (error := capsys.readouterr().err)
    assert "called exit(0)" in error


def write_after_the_loop_has_closed():
    """Does what orbax does when one of many writes fails: it waits no longer for the others."""
    promise, future = tensorstore.Promise.new()

    async def wait():
        await future

    loop = asyncio.new_event_loop()
    task = loop.create_task(wait())
    task._log_destroy_pending = False
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    promise.set_result(None)


def test_a_full_disk_is_one_message(monkeypatch, capsys, caplog):
    full, news, shown = OSError(errno.ENOSPC, "x"), KeyError("news"), []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: shown.append(found.exc_value))
    monkeypatch.setattr(threading, "excepthook", lambda found: shown.append(found.exc_value))

    def fail(error):
        raise error

    def train(config, **_):
        write_after_the_loop_has_closed()
        for error in (full, news):
            writer = threading.Thread(target=fail, args=(error,))  # as TensorBoard's
            writer.start()
            writer.join()
        logging.getLogger("asyncio").error("a line without an error", exc_info=False)
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
    assert [record.message for record in caplog.records] == ["a line without an error"]
    assert shown == [news]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("argv", [["config", *REQUIRED], ["losses", "grpo"]])  # long, and short
def test_unwritable_output_is_an_error(argv):
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
    assert "8 prompts, 0 too long and skipped\naccuracy: " in out

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


def test_generate_respects_the_models_positions(material, capsys):
    """sampling.max_tokens is 512 by default, twice as many."""
    argv = ["--model.path", f"{material}/untrained", "--prompt.template=text", "1+1="]
    assert main(["generate", "--precision=fp32", "--greedy", *argv]) == 0
    assert capsys.readouterr().out.startswith("1+1=\n")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            "1+1=" * 100,
            r"prompt 2 \('1\+1=.*'\.\.\.\) has 400 tokens, and the model \S+ takes 256 ",
        ),
        (
            "x" * 10_000_000,
            r"prompt 2 \('x.*'\.\.\.\) has 10000000 characters, and the model \S+ takes",
        ),
        ("", r"prompt 2 \(''\) has no tokens"),
        (os.fsdecode(b"\xff"), r"prompt 2 \('\\udcff'\): '\\udcff' is half of a character"),
    ],
    ids=["tokens", "characters", "empty", "bytes"],
)
def test_invalid_prompt_is_named(material, capsys, prompt, message):
    argv = ["--model.path", f"{material}/untrained", "--prompt.template=text", "1+1=", prompt]
    assert main(["generate", "--sampling.max_tokens=6", *argv]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_standard_input_must_be_utf8(material, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"1+1=\n\xff"), "utf-8"))
    assert main(["generate", "--model.path", f"{material}/untrained"]) == 1
    assert "jaxrl generate: standard input is not UTF-8: " in capsys.readouterr().err
