"""Small runs with environments: config, training loop, stream, evaluation."""

import json
from pathlib import Path

import pytest

from jaxrl import train
from jaxrl.cli import main
from jaxrl.config.toml_file import ConfigError
from jaxrl.config.training import Config
from jaxrl.core.batch import to_json
from jaxrl.tracking.tracker import read_metrics
from jaxrl.training.progress import Progress
from jaxrl.training.rollouts.collect import collect
from jaxrl.training.run import open_run
from tests import tiny
from tests.documented import undocumented
from tests.run_config import run_config

ENVIRONMENTS = """
import httpx2
from jaxrl.environments.episodes.base import Step


class Single:
    def __init__(self, context):
        pass

    def reset(self, example):
        return example.tokens

    def step(self, completion):
        return Step(done=True)


class Twice:
    \"\"\"Observes "b;a:" once, rewards each turn by its tokens, and fails for one prompt.\"\"\"

    def __init__(self, context, *, fails: str):
        self.context, self.fails, self.turns = context, fails, 0

    async def reset(self, example):
        if example.row["prompt"] == self.fails:
            raise KeyError(self.fails)
        return example.tokens

    async def step(self, completion):
        self.turns += 1
        seen = self.context.tokenizer.encode("b;a:", add_special_tokens=False)
        return Step(seen, float(len(completion)), self.turns == 2)


def chats(endpoint, example):
    \"\"\"Begins two conversations and continues the first; fails for one prompt.\"\"\"

    def ask(*messages):
        body = {"model": endpoint.model, "messages": messages, "max_tokens": 8}
        url = endpoint.openai_url + "/chat/completions"
        reply = httpx2.post(url, json=body, timeout=250).raise_for_status()
        return reply.json()["choices"][0]["message"]

    if example["prompt"] == "0+1=":
        raise KeyError("0+1=")
    user = {"role": "user", "content": example["prompt"]}
    first = ask(user)
    ask({"role": "user", "content": "b"})
    if example["prompt"] == "0+0=":
        httpx2.post(endpoint.url + "/reward", json={"reward": 2}, timeout=250).raise_for_status()
        ask(user, first, {"role": "user", "content": "a"})


def shorter(completion, example):
    return -float(len(completion))
"""


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("material")
    tiny.write_checkpoint(directory / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(2) for b in range(3)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "mine.py").write_text(ENVIRONMENTS)
    return directory


def config(material: Path, run_dir: Path, **changes: str) -> Config:
    own = {
        "run_dir": run_dir,
        "data.max_prompt_tokens": 24,
        "reward.path": f"{material}/mine.py:shorter",
        "sampling.max_tokens": 20,
        "train.train_batch": 3,
        "train.group_size": 2,
        "train.microbatch_tokens": 88,
    }
    return run_config(material, **own | changes)


def test_single_turn_environment_changes_no_bit(material, tmp_path):
    single = {"environment.name": f"{material / 'mine.py'}:Single", "train.mask_truncated": "true"}
    with open_run(config(material, tmp_path / "run", **single)) as (run, _, _):
        source, task = run.source, run.source.task
        found = collect(source, progress=Progress(), seconds={})
        task = task._replace(weights={"shorter": task.weights["shorter"]})
        single_turn = source._replace(episode_runner=None, task=task)
        plain = collect(single_turn, progress=Progress(), seconds={})
    for one, other in zip(found.batch, plain.batch, strict=True):
        assert one.components == (other.reward, 0.0)
        assert to_json(one._replace(episode=None, components=other.components)) == to_json(other)
    assert {r.truncated for r in found.batch} == {True, False}
    numbers = dict(found.numbers)
    assert numbers["turns"] == 1
    assert numbers["reward"] == plain.numbers["reward"]
    assert not {"turns", "episodes/done"} & plain.numbers.keys()


def test_episodes_are_sampled_while_the_learner_trains(material, tmp_path, capsys):
    changes = {
        "environment.name": f"{material / 'mine.py'}:Twice",
        "environment.fails": "0+1=",
        "reward.weights": "0.5",
        "sampling.max_tokens": "24",
        "train.microbatch_tokens": "96",
        "rollouts.max_staleness": "1",
    }
    result = train.train(config(material, tmp_path / "run", **changes))
    entries = read_metrics(tmp_path / "run" / "metrics.jsonl")
    entries = [e for e in entries if "event" not in e]  # the alarm of failed rewards
    assert undocumented({name for e in entries for name in e}) == ["step", "time"]
    steps = [e for e in entries if "reward" in e]
    assert sum(e["episodes/error"] for e in steps) == sum(e["reward/failed"] for e in steps) == 2
    assert "in reset: KeyError: '0+1='" in capsys.readouterr().err
    for e in steps:
        ended = sum(e[f"episodes/{end}"] for end in ("done", "max_tokens", "error"))
        assert ended == 6
        assert e["completion_length/max"] <= 24
        assert e["reward"] == pytest.approx(0.5 * e["reward/shorter"] + e["reward/environment"])
    answers = tmp_path / "answers.jsonl"
    file = str(tmp_path / "run" / "config.toml")
    held_out = ["--data.eval_path", str(material / "prompts.jsonl"), "--data.eval_limit", "3"]
    own = ["--model.path", str(result.model), "--reward.path", "", "--reward.weights", ""]
    assert main(["eval", file, *held_out, *own, "--completions", str(answers)]) == 0
    said = capsys.readouterr().out
    assert "episodes/error: 1" in said
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(rows) == 3
    whole = [row for row in rows if row["reward"] == row["reward"]]
    assert len(whole) == 2
    # Without a reward function, accuracy is the environment's reward: the tokens of its turns. The
    # episode that failed counts as wrong.
    mean = f"{sum(row['reward'] for row in whole) / 3:.1%}".replace("%", " %")
    assert f"accuracy: {mean}" in said
    assert " (1 of 3 could not be scored)" in said
    kept = tmp_path / "kept.jsonl"
    keep = ["--samples", "2", "--keep", "1:100", "--out", str(kept)]
    assert main(["eval", file, *own, *keep]) == 0
    said = capsys.readouterr()
    assert "kept 5; dropped 0 below 1, 0 above 100, 1 without a reward" in said.out
    assert "in reset: KeyError: '0+1='" in said.err
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert all(2 <= row["pass_rate"] <= 24 for row in rows)


def test_agents_of_a_gateway_train_with_all_their_conversations(material, tmp_path, capsys):
    """A run that stops in between is the same. Without packing, the sequences of an episode take
    more rows than a minibatch usually has."""
    changes = {
        "environment.name": "gateway",
        "environment.agent": f"{material / 'mine.py'}:chats",
        "reward.weights": "0.01",
        "sampling.max_tokens": "24",
        "train.microbatch_tokens": "96",
        "train.packing": "false",
        "train.steps": "2",
    }
    found = list[list[str]]()
    for name, steps in (("whole", ["2"]), ("parts", ["1", "2"])):
        for last in steps:
            train.train(config(material, tmp_path / name, **changes | {"train.steps": last}))
        entries = read_metrics(tmp_path / name / "metrics.jsonl")
        steps_of = [e for e in entries if "event" not in e and "reward" in e]
        assert sum(e["episodes/error"] for e in steps_of) == 2
        assert sum(e["episodes/done"] for e in steps_of) == 10
        assert all(e["environment/branches"] >= 1 for e in steps_of)
        assert undocumented({n for e in steps_of for n in e}) == ["step", "time"]
        found.append([str(e["grad_norm"]) for e in steps_of])
    assert "in chats: KeyError: '0+1='" in capsys.readouterr().err
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"environment.tools": "calculator"}, r"set environment\.name = 'agent'")],
)
def test_agent_keys_need_an_agent(material, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        config(material, tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "agents"}, r"environment\.name = 'agents': .* did you mean agent"),
        ({"name": "agent"}, r"environment\.tools is empty"),
        ({"name": "agent", "tools": "calculater"}, "did you mean calculator"),
        ({"name": "agent", "tools": "search"}, "without a file to search"),
        ({"name": "agent", "tools": "calculator,calculator"}, "two tools 'calculator'"),
        ({"name": "agent", "tools": "calculator", "cost": "1"}, r"environment\.cost: agent has no"),
        ({"name": "text_game"}, r"environment\.game is missing"),
    ],
)
def test_invalid_environment_is_refused_early(material, tmp_path, changes, message):
    keys = {f"environment.{name}": value for name, value in changes.items()}
    with pytest.raises(ValueError, match=message):
        train.train(config(material, tmp_path / "run", **keys))
    assert not (tmp_path / "run").exists()
