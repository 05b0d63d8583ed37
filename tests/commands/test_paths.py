"""Paths that no program can use: the message names the key, whichever key it is."""

import contextlib
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxrl.cli import main
from jaxrl.commands import paths
from jaxrl.commands.paths import check_paths, find_inputs
from jaxrl.commands.serve.command import ServeConfig
from jaxrl.config import toml_file
from jaxrl.config.doctor import DoctorConfig
from jaxrl.config.preference import DPOConfig, RewardModelConfig
from jaxrl.config.supervised import SFTConfig
from jaxrl.config.toml_file import ConfigError
from jaxrl.config.training import Config
from tests import tiny
from tests.run_config import run_arguments

BASE = {"model.path": "m", "data.path": "d.jsonl", "reward.path": "exact_match"}
DIRECTORIES = ["model.path", "reward.model", "critic.path", "lora.path", "run_dir", "sampler.store"]
FILES = ["data.path", "data.eval_path", "sampler.python"]
FUNCTIONS = list(paths._FUNCTIONS)
BESIDE = {
    "lora.path": {"lora.rank": "1"},
    "environment.tools": {"environment.name": "agent"},
    "critic.path": {"loss.name": "ppo"},
    "sampler.store": {"sampler.name": "vllm", "sampler.url": "http://h:1"},
}


def spelled(key: str, path: str) -> str:
    return f"file://{Path.cwd()}/{path}" if key == "sampler.store" else path


def load(key: str, value: str) -> Config:
    keys = BASE | BESIDE.get(key, {}) | {key: spelled(key, value)}
    return toml_file.load(Config, overrides=[*keys.items()])


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("file.py").touch()
    Path("folder").mkdir()
    Path("circle").symlink_to("circle")


def test_all_missing_inputs_are_named_at_once() -> None:
    config = toml_file.load(
        Config,
        overrides=[
            ("model.path", "nowhere"),
            ("data.path", "file.jsonl"),
            ("data.eval_path", "org/set:main"),
            ("reward.path", "rewards.py:score"),
            ("loss.name", "file.py:loss"),
        ],
    )
    expected = (
        "these do not exist: model.path = 'nowhere', data.path = 'file.jsonl', "
        "reward.path = 'rewards.py:score'; relative paths start at"
    )
    with pytest.raises(ConfigError, match=re.escape(expected)):
        find_inputs(config)
    Path("file.jsonl").touch()
    Path("rewards.py").touch()
    assert find_inputs(config) == config  # its reader says what a single one means


@pytest.mark.parametrize("key", [*DIRECTORIES, *FILES, *FUNCTIONS])
def test_refused_path_names_its_key(key: str) -> None:
    for bad, reason in (
        ("x" * 5000, "File name too long"),
        ("folder/" + "\N{SNOWMAN}" * 100, "File name too long"),  # 300 bytes
        ("a/" * 3000, "File name too long"),
        ("file/x", "Not a directory"),
        ("circle", "Too many levels of symbolic links"),
    ):
        value = f"{bad}/own.py:function" if key in FUNCTIONS else bad
        with pytest.raises(ConfigError, match=rf"^{key} = .*{reason}$"):
            check_paths(load(key, value))
    with pytest.raises(ConfigError, match=rf"^{key} = .*valid characters"):
        load(key, "a\0b")
    with pytest.raises(ConfigError, match=rf"^{key} = .*valid characters"):
        load(key, os.fsdecode(b"\xff"))


@pytest.mark.parametrize("key", [*DIRECTORIES, *FILES, *FUNCTIONS])
def test_path_of_wrong_kind_names_its_key(key: str) -> None:
    right, wrong = ("folder", "file") if key in DIRECTORIES else ("file", "folder")
    if key in FUNCTIONS:
        Path("folder.py").mkdir()
        right, wrong = "file.py:function", "folder.py:function"
    check_paths(load(key, right))
    check_paths(load(key, f"missing/{right}"))
    named = f"{key} = '{spelled(key, wrong)}': expected a "
    with pytest.raises(ConfigError, match=f"^{re.escape(named)}"):
        check_paths(load(key, wrong))


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Runs the block as a user that file permissions hold for."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="changes the user of this process")
@pytest.mark.parametrize("key", [*DIRECTORIES, *FILES, *FUNCTIONS])
def test_unreadable_path_names_its_key(key: str, tmp_path: Path) -> None:
    name = "folder" if key in DIRECTORIES else "file"
    value = "file.py:function" if key in FUNCTIONS else name
    config = load(key, value)
    for path in (name, "file.py"):
        Path(path).chmod(0)
    closed = load(key, f"folder/{value}")
    tmp_path.chmod(0o755)
    with as_nobody(), pytest.raises(ConfigError, match=rf"^{key} = .*Permission denied"):
        check_paths(config)
    Path("folder").chmod(0)
    with as_nobody(), pytest.raises(ConfigError, match=rf"^{key} = .*Permission denied"):
        check_paths(closed)


def test_every_key_of_a_path_is_checked() -> None:
    schemas = (Config, SFTConfig, DPOConfig, RewardModelConfig, DoctorConfig, ServeConfig)
    names = {name for schema in schemas for name in toml_file.keys(schema)}
    ends = ("path", "run_dir", "store", "python", "log", "out")
    known = {*paths._DIRECTORIES, *paths._FILES, *paths._FUNCTIONS}
    assert {name for name in names if name.rpartition(".")[2] in ends} <= known <= names


def test_commands_name_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("config", "train", "eval"):
        argv = [command, *(f"--{name}={text}" for name, text in BASE.items())]
        assert main([*argv, "--model.path", "x" * 5000]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"jaxrl {command}: model.path = 'xxx")
        assert error.endswith("...: File name too long\n")


@pytest.mark.parametrize("value", ["missing", "missing.jsonl", "shards/*.jsonl", "folder"])
def test_missing_data_names_its_key(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    tiny.write_checkpoint(tmp_path / "model")
    Path("prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    held_out = {"data.max_prompt_tokens": 32}
    for key, argv in (
        ("data.path", ["doctor", "model", "--data.path", value, "--out", "out"]),
        ("data.path", ["generate", "--model.path", "model", "--data.path", value]),
        *(
            ("data.path", ["data", option, "--model.path", "model", "--data.path", value])
            for option in ("--sft", "--dpo")
        ),
        ("data.path", ["train", *run_arguments(tmp_path, data__path=value)]),
        ("data.eval_path", ["train", *run_arguments(tmp_path, **held_out, data__eval_path=value)]),
        ("data.eval_path", ["eval", *run_arguments(tmp_path, **held_out, data__eval_path=value)]),
    ):
        assert main(argv) == 1
        assert f"{key} = {value!r}" in capsys.readouterr().err, argv


def test_inputs_are_also_found_beside_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder/own.toml").write_text(
        'run_dir = "runs/own"\n[model]\npath = "model"\n[data]\npath = "rows.jsonl"\n'
        'eval_path = "file.jsonl"\n[reward]\npath = ["exact_match", "own.py:score"]\n'
    )
    for name in ("folder/rows.jsonl", "folder/file.jsonl", "file.jsonl"):
        Path(name).touch()
    Path("folder/own.py").write_text("def score(completion, example):\n    return 1.0\n")
    Path("folder/model").mkdir()
    Path("folder/runs/own").mkdir(parents=True)
    assert main(["config", "folder/own.toml"]) == 0
    found = toml_file.flatten(toml_file.validate(Config, tomllib.loads(capsys.readouterr().out)))
    assert found["model.path"] == "folder/model"
    assert found["data.path"] == "folder/rows.jsonl"
    assert found["data.eval_path"] == "file.jsonl"  # what is here comes first
    assert found["reward.path"] == ("exact_match", "folder/own.py:score")
    assert found["run_dir"] == "runs/own"  # a run goes where the command is given
    Path("folder/rows-1.jsonl").touch()
    toml = Path("folder/own.toml").read_text().replace('"rows.jsonl"', '"rows-*.jsonl"')
    Path("folder/shards.toml").write_text(toml)
    assert main(["config", "folder/shards.toml"]) == 0
    assert 'path = "folder/rows-*.jsonl"' in capsys.readouterr().out
    given = ["--data.path", "rows.jsonl"]
    assert main(["config", "folder/own.toml", *given]) == 0
    assert 'path = "rows.jsonl"' in capsys.readouterr().out  # so does what is typed
