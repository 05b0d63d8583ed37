"""What the pages tell a reader to type is what the programs understand, and is run or marked."""

import argparse
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
from jaxrl.environments.tools.schema import load_tools
from jaxrl.losses import preference
from tests import arithmetic
from tests.documented import INLINE, PAGES, ROOT, Command, commands, prose, snippets

COMMANDS = list(commands())
STANDS_FOR = {"FILE": "configs/quickstart.toml", "I": "0"}

# Commands that no comment marks: the test that runs them with a tiny model, or what they need.
LIVE = "test_live.py::test_command_updates_until_interrupted"
PAGE = "test_report.py::test_page_holds_the_data_and_loads_nothing"
ANSWERS = "test_cli.py::test_eval_and_generate_agree"
ADAPTERS = "test_train.py::test_adapters_are_trained_resumed_and_exported"
INDEX = "needs a package index"
QUICK = "test_reproductions.py::test_quick_mode"
ELSEWHERE = {
    "jaxrl train --help": "test_cli.py::test_help_of_train_is_one_screen_that_leads_to_every_table",
    "jaxrl train --model.path DIR --data.path prompts.jsonl --reward.path my_rewards.py:score "
    "--precision bf16_master --train.steps 200": (
        "test_resume.py::test_killed_and_resumed_equals_undisturbed"
    ),
    "jaxrl train --help all": ("test_cli.py::test_help_of_train_shows_every_key_with_its_default"),
    "jaxrl init": "test_cli.py::test_init_writes_a_run_that_loads",
    "jaxrl init first": "test_cli.py::test_init_writes_a_run_that_loads",
    "jaxrl completion zsh": "test_cli.py::test_bash_completes_commands_and_keys",
    "jaxrl watch RUN": LIVE,
    "jaxrl watch runs/mine": LIVE,
    "jaxrl watch runs/quickstart/grpo": LIVE,
    "jaxrl report RUN": PAGE,
    "jaxrl report runs/mine": PAGE,
    "jaxrl report runs/quickstart/grpo": PAGE,
    "jaxrl report runs/mine runs/first --out compared.html": (
        "test_report.py::test_two_runs_on_one_page_in_another_directory"
    ),
    "jaxrl eval mine.toml --completions before.jsonl": ANSWERS,
    "jaxrl eval mine.toml --samples 8 --json scores.json": (
        "test_eval.py::test_samples_by_column_of_two_data_sets"
    ),
    "jaxrl eval mine.toml --model.path runs/mine/model --completions after.jsonl": ANSWERS,
    "jaxrl generate --model.path runs/mine/model --greedy 347+585=?": ANSWERS,
    'jaxrl train FILE --lora.rank 16 --lora.alpha 32 --lora.targets ["q_proj", "v_proj"]': ADAPTERS,
    "jaxrl export RUN OUT": ADAPTERS,
    "jaxrl export RUN OUT --adapter": ADAPTERS,
    "jaxrl export RUN OUT --step best": "test_pairs.py::test_reward_model_learns_to_rank",
    "jaxrl export runs/mine OUT --dtype bf16": (
        "test_cli.py::test_export_writes_the_requested_checkpoint"
    ),
    "jaxrl doctor MODEL": "test_doctor.py::test_mismatch_is_attributed_to_its_source",
    "jaxrl serve MODEL_DIR --max_lora_rank 16": (
        "test_vllm_server.py::test_adapters_are_published_alone"
    ),
    "jaxrl serve TEACHER --port 8001": (
        "test_vllm_server.py::test_a_teacher_on_a_server_scores_as_in_the_learners_process"
    ),
    "jaxrl serve MODEL_DIR --host ADDRESS": ("test_launch.py::test_every_server_has_a_key"),
    "jaxrl train FILE --hosts.coordinator HOST0:9911 --hosts.processes 4 --hosts.process I": (
        "test_hosts.py::test_run_of_two_then_four_processes_then_one_equals_that_of_one"
    ),
    "jaxrl train FILE --hosts.coordinator auto": "needs a cluster; the page says it was not tried",
    "scripts/reproduce_phantom_clipping.py --quick": QUICK,
    "scripts/reproduce_fp16.py --quick": QUICK,
    "pip install -e .[cuda]": INDEX,
    "pip install -e .[tpu]": INDEX,
    "pip install -e .[hub,math]": INDEX,
    "pip install jax[tpu]": INDEX,
    "pip install wandb": INDEX,
    "pip install mlflow": INDEX,
    "pip install vllm==0.32.0 lazy-loader": INDEX,
    "pip install --no-deps -e .": "what scripts/make_venv.sh does in every fresh environment",
    "hf auth login": "needs an account on the Hugging Face hub",
    "tensorboard --logdir profile": "needs its profile plugin, and somebody who looks",
    "scripts/experiments/false_alarms.py --steps 24 --windows 5 8 10": "needs the quickstart",
}
# Commands that are run below, and what they show.
HERE = {
    "jaxrl config mine.toml": 'path = "prompts.jsonl"',
    "jaxrl config FILE": "[train]",
    "jaxrl plan mine.toml --estimate": "GRPO",
    "jaxrl plan gsm8k.toml --estimate": "Publishing 1.1 GiB",
    "jaxrl plan configs/qwen3_8b.toml --estimate --rollout-seconds 60 --train-seconds 40": (
        "8.2B parameters"
    ),
    "jaxrl losses": "grpo",
    "jaxrl losses gspo rloo": "rloo",
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
    (tmp_path / "untrained").rename(tmp_path / "runs/quickstart/sft/model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def ends_when_read(place, monkeypatch):
    parse_args, parse = argparse.ArgumentParser.parse_args, options.parse

    def stop(self, *arguments):
        raise Understood(parse_args(self, *arguments))

    def stop_with_config(*arguments):
        with monkeypatch.context() as inner:
            inner.setattr(argparse.ArgumentParser, "parse_args", parse_args)
            raise Understood(parse(*arguments).config)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(options, "parse", stop_with_config)
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
    assert name in cli.COMMANDS
    if not arguments and not command.block:
        return  # the command's name, in a sentence
    module = cli.load(name)
    config = understood(lambda: module.main(arguments))
    if isinstance(config, Config):
        make_recipe(config)


@pytest.mark.parametrize(
    "command",
    [c for c in COMMANDS if c.words[0].startswith("scripts/")],
    ids=lambda c: f"{c.where}: {c.text}",
)
def test_the_script_is_there_and_knows_its_options(command: Command, ends_when_read, monkeypatch):
    script = ROOT / command.words[0]
    if script.suffix == ".sh" or "main()" not in script.read_text():
        assert script.is_file()
        assert script.suffix == ".py" or os.access(script, os.X_OK)
        assert len(command.words) == 1 or script.name in ("test.sh", "make_venv.sh")
        return
    monkeypatch.setattr(sys, "argv", list(command.words))
    monkeypatch.syspath_prepend(script.parent)
    assert understood(lambda: runpy.run_path(str(script), run_name="__main__"))


def test_extras_that_are_installed_are_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [word for c in COMMANDS if c.words[0] == "pip" for word in c.words[1:]]
    named = {extra for word in asked if word.startswith(".[") for extra in word[2:-1].split(",")}
    assert named
    assert named <= project["optional-dependencies"].keys()


def test_every_command_is_run_or_marked():
    marked = {c.text for c in COMMANDS if c.marked}
    open_ones = [
        f"{c.where}: {c.text}"
        for c in COMMANDS
        if (c.block or len(c.words) > 2) and c.text not in marked | HERE.keys() | ELSEWHERE.keys()
    ]
    assert not open_ones, "no test runs them, and nothing behind them says what they need"
    assert not (HERE.keys() | ELSEWHERE.keys()) - {c.text for c in COMMANDS}, (
        "not documented any more"
    )


def test_the_tests_that_are_named_are_there():
    pages = "\n".join([*(page.read_text() for page in PAGES), *ELSEWHERE.values()])
    for file, name in set(re.findall(r"(test_\w+\.py)::(test_\w+)", pages)):
        found = list((ROOT / "tests").rglob(file))
        assert any(f"def {name}(" in path.read_text() for path in found), f"{file}::{name}"


@pytest.mark.parametrize("text", HERE)
def test_cheap_commands_do_what_they_say(text: str, place, capsys):
    _, *arguments = next(command.words for command in COMMANDS if command.text == text)
    assert cli.main([STANDS_FOR.get(word, word) for word in arguments]) == 0
    assert HERE[text] in capsys.readouterr().out


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


def test_keys_that_are_named_are_keys():
    schemas = Config, SFTConfig, DPOConfig, RewardModelConfig, DoctorConfig, GenerateConfig
    known = {name for schema in schemas for name in toml_file.keys(schema)}
    tables = {name.partition(".")[0] for name in known if "." in name} - {"environment"}
    known |= {f"loss.{p.name}" for p in catalogue.list_terms()}
    known |= {f"loss.{p.name}" for entry in catalogue.list_recipes() for p in entry.parameters}
    for loss in (preference.sigmoid, preference.rpo, preference.length_desensitized):
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
