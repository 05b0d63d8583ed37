"""Tasks of reasoning-gym by name, with a stand-in for the package: sums whose scorer is lenient."""

import random
import sys
from types import SimpleNamespace

import pytest

from jaxrl.builders.task import load_task
from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.data.rows import read_rows
from jaxrl.environments.rewards import builtin
from jaxrl.environments.rewards.score import load_rewards, score
from jaxrl.huggingface import Checkpoint
from tests import tiny
from tests.run_config import run_config, run_keys


def sums(name, *, seed, size=3, largest=9):
    """As the package's: row i is a function of seed + i, and a list has a length."""
    if name != "sums":
        raise ValueError(f"Dataset '{name}' not registered")
    assert largest > 1, "largest must be > 1"
    draws = (random.Random(seed + i) for i in range(size))
    pairs = [(draw.randint(1, largest), draw.randint(1, largest)) for draw in draws]
    return [
        {
            "question": f"{a}+{b}=",
            "answer": str(a + b),
            "metadata": {"source_dataset": name, "pair": (a, b)},
        }
        for a, b in pairs
    ]


def scorer(name):
    assert name == "sums"
    return lambda answer, entry: 1.0 if answer == entry["answer"] else 0.1 * answer.isdigit()


@pytest.fixture
def package(monkeypatch):
    module = SimpleNamespace(create_dataset=sums, get_score_answer_fn=scorer)
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    builtin._scorer.cache_clear()
    yield
    builtin._scorer.cache_clear()


def test_settings_and_seeds_make_the_rows(package):
    def records(path, split="train"):
        return [row.record for row in read_rows(path, split=split)]

    rows = records("reasoning_gym:sums")
    assert [row["prompt"] for row in rows] == [e["question"] for e in sums("sums", seed=0)]
    assert records("reasoning_gym:sums:seed=1,size=2") == rows[1:]  # as the package numbers them
    assert len(records("reasoning_gym:sums:size=50,largest=2")) == 50
    many = {str(row["entry"]) for row in records("reasoning_gym:sums:size=200,largest=10000")}
    held_out = records("reasoning_gym:sums:size=200,largest=10000", "test")
    assert not many & {str(row["entry"]) for row in held_out}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("reasoning_gym:sum", "refuses the task 'sum' with the settings .*'sum' not registered"),
        ("reasoning_gym:sums:larges=3", "with the settings .*unexpected keyword argument 'larges'"),
        ("reasoning_gym:sums:largest=1", "largest must be > 1"),
        ("reasoning_gym:sums:largest", "write settings as size=2000,seed=1"),
    ],
)
def test_wrong_settings_are_explained(package, path, message):
    with pytest.raises(ValueError, match=message):
        list(read_rows(path))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ModuleNotFoundError, match="pip install reasoning-gym"):
        list(read_rows("reasoning_gym:sums"))


def test_its_scorer_is_the_reward_of_a_run(package, tmp_path):
    tiny.write_checkpoint(tmp_path / "model")
    keys = run_keys(tmp_path) | {"data.path": "reasoning_gym:sums", "data.max_prompt_tokens": "24"}
    del keys["reward.path"]
    config = toml_file.load(
        Config, overrides=[*keys.items(), ("data.eval_path", "reasoning_gym:sums")]
    )
    assert config.reward.path == ("reasoning_gym",)
    assert toml_file.validate(Config, config.model_dump()) == config
    own = run_config(tmp_path, **keys | {"reward.path": "exact_match"})
    assert own.reward.path == ("exact_match",)  # one's own wins

    task = load_task(config, Checkpoint(tmp_path / "model"), splits=("train", "test"))
    assert task.held_out is not None
    example = task.prompts.examples[0]
    right = example["answer"]
    texts = {
        right: 1.0,
        f" {right}\n": 1.0,
        f"<think>7</think>\n{right}": 1.0,
        f"I say <answer>3</answer>, no, <answer> {right} </answer>.": 1.0,
        f"{right} or so": 0.0,
        "77777": 0.1,
    }
    found = score(load_rewards(config.reward.path), list(texts), [example] * len(texts))
    assert found.total.tolist() == [*texts.values()]
