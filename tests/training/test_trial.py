"""Rewards and environments are tried on the first row, before the model's weights are read."""

import json
from pathlib import Path

import pytest

from jaxrl.cli import main
from jaxrl.training.run import open_run
from tests import tiny
from tests.run_config import run_arguments, run_config

ROWS = [{"prompt": "6*7=", "answer": "42", "tags": ["a"]}, {"prompt": "1=", "answer": "1"}]
MINE = """
from jaxrl.environments import Step, batched

def score(completion, example):
    return float(completion == example["answer"])

async def later(completion, example):
    return score(completion, example)

@batched
def whole(completions, examples):
    return [score(*pair) for pair in zip(completions, examples)]

def words(completion, example):
    return 1 / len(completion.split())

def solved(completion, example):
    return example["solution"] == completion

def model(completion, example):
    return 1.0

std = environment = model

def same(completion, example):
    keys = {"prompt", "answer", "tags", "rendered_prompt"}
    assert example["prompt"] == "6*7=" and example["rendered_prompt"] == "u:6*7=;a:"
    return float(set(example) == keys and example["tags"] == ["a"])

class Same:
    def __init__(self, context, *, wrong=False):
        self.context, self.wrong = context, wrong

    def reset(self, example):
        self.answer, self.same = example["solution" if self.wrong else "answer"], same("", example)
        return example.tokens

    def step(self, completion):
        said = self.context.tokenizer.decode(completion, skip_special_tokens=True)
        return Step((), float(said == self.answer) + 10 * self.same, True)
"""


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    """A run whose model has no weights: a trial needs none."""
    directory = tmp_path_factory.mktemp("trial")
    tiny.write_checkpoint(directory / "model")
    (directory / "model/model.safetensors").unlink()
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (directory / "mine.py").write_text(MINE)
    return directory


def said(material: Path, capsys, *, command: str = "train", **changes: str) -> str:
    changes |= {"data.eval_path": f"{material}/prompts.jsonl"} if command == "eval" else {}
    changes["data.max_prompt_tokens"] = "16"
    assert main([command, *run_arguments(material, **changes)]) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_reward_that_always_raises_ends_the_run_before_the_model_is_read(
    material, capsys, command
):
    told = said(material, capsys, command=command, reward__path=f"{material}/mine.py:solved")
    line = 1 + MINE.splitlines().index('    return example["solution"] == completion')
    place = f"{material}/mine.py:{line} in solved: KeyError: 'solution'"
    assert "mine.py:solved': on the first row of the data, reward solved failed on" in told
    assert place in told
    assert "correct the function, or the row" in told
    assert "safetensors" not in told


def test_an_environment_that_always_raises_ends_the_run_before_the_model_is_read(material, capsys):
    mine = {"environment.name": f"{material}/mine.py:Same", "environment.wrong": "true"}
    told = said(material, capsys, **mine)
    line = 1 + next(i for i, text in enumerate(MINE.splitlines()) if "if self.wrong" in text)
    assert f"reset failed: {material}/mine.py:{line} in reset: KeyError: 'solution'" in told
    assert "correct the environment, or the row" in told
    assert "safetensors" not in told


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("std", {}),
        ("model", {"reward.model": "teacher"}),
        ("environment", {"environment.name": "mine.py:Same"}),
    ],
)
def test_a_reward_is_not_named_as_another_part_of_it(material, capsys, monkeypatch, name, changes):
    monkeypatch.chdir(material)
    changes = {"reward.path": f"mine.py:words,mine.py:{name}"} | changes
    assert f"reward.path names a function '{name}', and reward/{name} is a metric of" in said(
        material, capsys, **changes
    )


def test_values_of_the_first_row_are_shown(material, tmp_path, capsys):
    tiny.write_checkpoint(tmp_path / "model")
    names = ("score", "later", "whole", "words", "same", "solved")
    paths = ",".join(f"{material}/mine.py:{name}" for name in names)
    changes = {
        "reward.path": paths,
        "reward.weights": "1,1,1,1,1,0",
        "data.path": str(material / "prompts.jsonl"),
        "data.max_prompt_tokens": "16",
        "environment.name": f"{material}/mine.py:Same",
    }
    with open_run(run_config(tmp_path, **changes)):
        pass
    told = capsys.readouterr().err
    for name in ("score", "later", "whole"):
        assert f'first row: {name}("42") = 1.0, {name}("") = 0.0\n' in told
    assert 'first row: words("42") = 1.0, words("") failed; reward words failed on ' in told
    assert "in words: ZeroDivisionError: " in told
    assert 'first row: same("42") = 1.0, same("") = 1.0\n' in told
    assert 'first row: solved("42") failed, solved("") failed; ' in told  # of weight 0
    assert 'first row: environment("42") = 11.0, environment("") = 10.0\n' in told
