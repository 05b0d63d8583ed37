import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxrl.commands import compile_cache
from tests import arithmetic
from tests.processes import XLA_FLAGS
from tests.run_config import run_arguments

# Runs a command in a process of its own; the last line counts programs: all, and those loaded.
COUNTED = """
import collections, json, sys
sys.modules["torch"] = None
from jaxrl import cli
load, found = cli.load_command, collections.Counter()
def counting(name):
    module = load(name)
    import jax
    jax.monitoring.register_event_listener(lambda event, **_: found.update([event]))
    jax.monitoring.register_event_duration_secs_listener(lambda e, s, **_: found.update([e]))
    return module
cli.load_command = counting
status = cli.main()
print(json.dumps([found["/jax/core/compile/backend_compile_duration"],
                  found["/jax/compilation_cache/cache_hits"]]))
sys.exit(status)
"""


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("arithmetic")
    arithmetic.write(directory)
    return directory


def programs(command: list[str], **environment: str) -> tuple[int, int]:
    """Numbers of programs that a command had compiled or loaded, and loaded."""
    own = ("JAX_COMP", "JAX_PERS", "XLA_FLAGS")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    ended = subprocess.run(
        [sys.executable, "-c", COUNTED, *command],
        env=inherited | {"XLA_FLAGS": XLA_FLAGS} | environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    every, loaded = json.loads(ended.stdout.splitlines()[-1])
    return every, loaded


def test_second_start_of_train_compiles_nothing(material, tmp_path):
    own = {
        "precision": "bf16_master",
        "model.path": material / "untrained",
        "data.path": material / "train.jsonl",
        "data.max_prompt_tokens": 12,
        "reward.path": "numeric_match",
        "train.steps": 1,
        "train.train_batch": 2,
        "train.group_size": 2,
        "train.row_length": 32,
        "probe.every": 10,
    }

    def start(name: str) -> tuple[int, int]:
        given = run_arguments(material, run_dir=tmp_path / name, **own)
        return programs(["train", *given], XDG_CACHE_HOME=str(tmp_path / "caches"))

    every, loaded = start("first")
    assert loaded < every
    every, loaded = start("second")  # two threads may ask for one program, and then both count it
    assert loaded == every > 0


def test_jax_variable_turns_the_cache_off(material, tmp_path):
    command = [
        "generate",
        f"--model.path={material / 'untrained'}",
        "--sampling.max_tokens=4",
        "1=",
    ]
    off = {"XDG_CACHE_HOME": str(tmp_path), "JAX_ENABLE_COMPILATION_CACHE": "0"}
    every, loaded = programs(command, **off)
    assert every > 0
    assert loaded == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def settings(monkeypatch, **environment: str) -> dict[str, str]:
    monkeypatch.setattr(compile_cache.os, "environ", environment)
    jax = SimpleNamespace(config=SimpleNamespace(update=lambda name, value: None))
    monkeypatch.setitem(sys.modules, "jax", jax)
    compile_cache.use_compile_cache()
    return environment


def test_default_cache_is_bounded_per_processor(tmp_path, monkeypatch):
    directories = set()
    for processor in ("one", "another"):
        monkeypatch.setattr(compile_cache, "processor", lambda name=processor: name)
        found = settings(monkeypatch, XDG_CACHE_HOME=str(tmp_path))
        directories.add(Path(found["JAX_COMPILATION_CACHE_DIR"]))
        assert int(found["JAX_COMPILATION_CACHE_MAX_SIZE"]) > 0
    assert len(directories) == 2
    assert all(path.is_relative_to(tmp_path / "jaxrl") for path in directories)


def test_users_cache_directory_is_not_bounded(tmp_path, monkeypatch):
    given = {"XDG_CACHE_HOME": str(tmp_path), "JAX_COMPILATION_CACHE_DIR": "mine"}
    found = settings(monkeypatch, **given)
    assert found["JAX_COMPILATION_CACHE_DIR"] == "mine"
    assert "JAX_COMPILATION_CACHE_MAX_SIZE" not in found
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "given",
    [{"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, {"JAX_NUM_CPU_DEVICES": "8"}],
)
def test_simulated_devices_have_no_cache(given, tmp_path, monkeypatch):
    found = settings(monkeypatch, XDG_CACHE_HOME=str(tmp_path), **given)
    assert "JAX_COMPILATION_CACHE_DIR" not in found
    assert not any(tmp_path.iterdir())


def test_unwritable_cache_directory_disables_the_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    found = settings(monkeypatch, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert "JAX_COMPILATION_CACHE_DIR" not in found
