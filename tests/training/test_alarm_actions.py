"""Alarms on real small runs: one is hacked and recovers, one is too fast, eleven are healthy."""

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import train
from jaxrl.builders import learner as builder
from jaxrl.cli import main
from jaxrl.config import alarms, toml_file
from jaxrl.config.toml_file import ConfigError
from jaxrl.config.training import Config
from jaxrl.diagnostics.alarms.check import replay_alarms
from jaxrl.diagnostics.alarms.history import History
from jaxrl.diagnostics.alarms.limits import Limits
from jaxrl.models import spec
from jaxrl.tracking.tracker import read_metrics, write_lines
from jaxrl.training import rollbacks, run
from jaxrl.training.alarm_actions import AlarmActions
from jaxrl.training.evaluate import Evaluation
from tests import tiny
from tests.run_config import run_keys

pytestmark = pytest.mark.usefixtures("optimized")

# What is wanted is a digit in front; what also pays, and more, is a row of a's.
REWARDS = """
def digit(completion, example):
    return float(completion[:1].isdigit())

def loophole(completion, example):
    return completion.count("aa") / 10

def digits(completion, example):
    return len({c for c in completion if c.isdigit()}) / 10
"""


@pytest.fixture(scope="module", autouse=True)
def short_window():
    """These runs are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alarms, "LIMITS", Limits(warmup=5, window=5))
        yield


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A model, prompts and rewards."""
    directory = tmp_path_factory.mktemp("material")
    tiny.write_checkpoint(directory / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "rewards.py").write_text(REWARDS)
    return directory


def keys(material: Path, run_dir: Path, **changes: str) -> dict[str, str]:
    own = {
        "run_dir": run_dir,
        "data.max_prompt_tokens": 12,
        "reward.path": f"{material}/rewards.py:digit",
        "loss.kl": 0.4,
        "sampling.max_tokens": 12,
        "train.steps": 40,
        "train.train_batch": 8,
        "train.group_size": 8,
        "train.microbatch_tokens": 512,
        "optimizer.learning_rate": 0.003,
        "checkpoint.every": 5,
    }
    return run_keys(material, **own | changes)


def config(material: Path, run_dir: Path, **changes: str) -> Config:
    return toml_file.load(Config, overrides=list(keys(material, run_dir, **changes).items()))


def column(entries: list[dict], name: str) -> list[float]:
    return [entry[name] for entry in entries if name in entry]


def events(run_dir: Path) -> list[dict]:
    return [e["event"] for e in read_metrics(run_dir / "metrics.jsonl") if "event" in e]


def test_hacked_run_is_rolled_back_and_recovers(material, tmp_path, capsys):
    rewards = material / "rewards.py"
    changes = {
        "reward.path": f'["{rewards}:digit", "{rewards}:loophole"]',
        "reward.weights": "1,4",
        "loss.kl": "0.1",
        "judge.path": f"{rewards}:digit",
        "judge.every": "1",
        "alarms.diversity": "rollback_kl",
    }
    asked = config(material, tmp_path / "run", **changes)
    result = train.train(asked)
    assert result.step == 40
    assert result.verdict is None
    (made,) = rollbacks.read(tmp_path / "run")
    assert made.alarm == "diversity"
    assert made.changes == {"loss.kl": [0.1, 0.2]}
    assert 0 < made.to <= made.at - 5
    # What the hacked part did is kept apart, and the run's own metrics have each step once.
    undone = read_metrics(tmp_path / "run/rolled_back_1.jsonl")
    entries = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [e["step"] for e in undone if "reward" in e] == [*range(made.to + 1, made.at + 1)]
    assert [e["step"] for e in entries if "reward" in e] == [*range(1, 41)]
    # A replay over the metrics sees what the run saw.
    whole = [e for e in entries if e["step"] <= made.to and "to" not in e.get("event", {})] + undone
    seen = [(e["event"]["alarm"], e["event"]["at"]) for e in whole if "event" in e]
    assert {(a.name, a.step) for a in replay_alarms(whole, asked.alarms.limits)} == set(seen)
    # It was hacked: the loophole paid, and answers no longer depended on the prompt.
    assert column(undone, "reward/loophole")[-1] > 10 * (
        column(entries, "reward/loophole")[5] + 0.01
    )
    assert column(undone, "diversity/distinct")[-1] < 0.4
    # A judge that wants digits alone sees it earlier.
    assert next(at for name, at in seen if name == "judge") < made.at
    assert np.mean(column(undone, "judge/agreement")[-3:]) < 0.6
    # And recovers: what is wanted is still done, variety comes back, the distance shrinks.
    assert column(entries, "reward/digit")[-1] > 0.7
    assert (
        column(entries, "diversity/distinct")[-1] > 1.5 * column(undone, "diversity/distinct")[-1]
    )
    assert column(entries, "kl")[-1] < column(undone, "kl")[-1]
    # Nothing of it was silent.
    (event,) = [e for e in events(tmp_path / "run") if e["action"] == "rollback"]
    assert (event["at"], event["to"], event["changes"]) == (made.at, made.to, made.changes)
    assert undone[-1]["event"]["action"] == "rollback"
    assert f"back to step {made.to} with loss.kl 0.1 -> 0.2" in capsys.readouterr().err


def test_high_learning_rate_is_detected_early(material, tmp_path):
    changes = {
        "train.steps": "20",
        "reward.path": f"{material / 'rewards.py'}:digits",
        "loss.kl": "1.0",
        "loss.kl_estimator": "k2",
        "optimizer.name": "sgd",
        "optimizer.clip_norm": "none",
        "optimizer.warmup_steps": "19",  # beyond what is stable before it ends
        "optimizer.learning_rate": "3.9",
    }
    train.train(config(material, tmp_path / "run", **changes))
    rewards = column(read_metrics(tmp_path / "run/metrics.jsonl"), "reward")
    first = next(e["at"] for e in events(tmp_path / "run") if e["alarm"] == "gradient_spike")
    assert np.mean(rewards[first - 3 : first]) > 0.8 * np.mean(rewards[:3])
    assert max(rewards[first + 1 :]) < 0.7 * np.mean(rewards[first - 3 : first])


NAN = """
import jax.numpy as jnp
from jaxrl.losses import over_sampler, surrogate

def nan():
    return surrogate(lambda ratio, advantage: ratio * advantage * jnp.nan, over_sampler)
"""


def test_run_without_reward_spread_is_stopped(material, tmp_path, monkeypatch):
    """With the usual limits it would be step 10; the warm-up does not excuse it."""
    monkeypatch.setattr(alarms, "LIMITS", Limits(warmup=5, window=5, not_finite_steps=3))
    (tmp_path / "nan.py").write_text(NAN)
    changes = {"loss.name": f"{tmp_path / 'nan.py'}:nan", "alarms.not_finite": "stop"}
    asked = keys(material, tmp_path / "run", **changes)
    del asked["loss.kl"]
    result = train.train(toml_file.load(Config, overrides=list(asked.items())))
    assert result.step == 3
    assert result.verdict is not None
    assert result.verdict.action == "stop"
    assert "no finite gradient of the policy after step 0, in 3 steps" in result.verdict.message
    (event,) = events(tmp_path / "run")
    assert (event["alarm"], event["action"], event["value"]) == ("not_finite", "stop", 3)


@pytest.fixture(scope="module")
def healthy(material, tmp_path_factory):
    """A run that goes well."""
    run_dir = tmp_path_factory.mktemp("healthy") / "run"
    train.train(config(material, run_dir, train__steps="30"))
    return run_dir


def test_healthy_run_raises_no_alarm(healthy):
    rewards = column(read_metrics(healthy / "metrics.jsonl"), "reward")
    assert rewards[-1] > 1.5 * rewards[0]
    assert events(healthy) == []


@pytest.fixture
def one_learner(monkeypatch):
    """The seeds of a run compute with the same functions, which are traced once; no model is
    written."""
    make, made = builder.build_learner, []

    def make_once(*args: Any, **kwargs: Any) -> Any:
        made.extend([] if made else [make(*args, **kwargs)])
        return made[0]

    monkeypatch.setattr(builder, "build_learner", make_once)
    monkeypatch.setattr(train, "export", lambda config, *_, **__: Path(config.run_dir))


@pytest.mark.usefixtures("one_learner")
def test_healthy_runs_raise_no_alarm(material, tmp_path, monkeypatch):
    """With the usual limits and windows: the first steps are judged too."""
    monkeypatch.setattr(alarms, "LIMITS", Limits())
    changes = {
        "train.steps": "25",
        "train.train_batch": "4",
        "checkpoint.every": "0",
        "samples.every": "0",
    }
    for seed in range(10):
        run_dir = tmp_path / str(seed)
        train.train(config(material, run_dir, seed=str(seed), **changes))
        rewards = column(read_metrics(run_dir / "metrics.jsonl"), "reward")
        assert np.mean(rewards[-10:]) > np.mean(rewards[:5])
        assert events(run_dir) == []


def test_paused_and_resumed_equals_undisturbed(material, healthy, tmp_path, capsys, monkeypatch):
    strict = Limits(warmup=5, window=30, kl_factor=0.001, kl_floor=0.0)
    monkeypatch.setattr(alarms, "LIMITS", strict)
    changes = {"train.steps": "30", "alarms.kl_spike": "pause"}
    given = keys(material, tmp_path / "run", **changes)
    arguments = ["train", *(f"--{key}={value}" for key, value in given.items())]
    assert main(arguments) == 3
    said = capsys.readouterr().out
    assert "paused: step 6: KL spike" in said
    assert "loss.kl" in said
    assert "run the same command to resume" in said
    assert (tmp_path / "run/checkpoints/6").is_dir()
    assert main(arguments) == 0
    models = [run / "model/model.safetensors" for run in (tmp_path / "run", healthy)]
    assert models[0].read_bytes() == models[1].read_bytes()
    assert [event["action"] for event in events(tmp_path / "run")] == ["pause"]


def test_last_evaluation_can_pause_the_run(material, tmp_path, monkeypatch):
    """The held-out score falls behind the last step: paused, and the same command ends the run."""
    scores = iter([0.9, 0.2])
    found = (
        Evaluation(np.full((1, 1), score), np.zeros((1, 1), bool), [""], {}, [], None)
        for score in scores
    )
    monkeypatch.setattr(train, "evaluate_greedily", lambda *_, **__: next(found))
    (tmp_path / "rising.py").write_text(
        "calls = 0\ndef rising(completion, example):\n    global calls\n"
        "    calls += 1\n    return calls\n"
    )
    changes = {
        "reward.path": f"{tmp_path / 'rising.py'}:rising",
        "train.steps": "3",
        "data.eval_path": str(material / "prompts.jsonl"),
        "data.eval_limit": "4",
        "alarms.held_out": "pause",
    }
    monkeypatch.setattr(alarms, "LIMITS", Limits(warmup=1, window=1))
    asked = config(material, tmp_path / "run", **changes)
    paused = train.train(asked)
    assert (paused.step, paused.model, paused.final_accuracy) == (3, None, 0.2)
    assert paused.verdict is not None
    assert "90.0% after step 0 and 20.0% after step 3" in paused.verdict.message
    assert replay_alarms(read_metrics(tmp_path / "run/metrics.jsonl"), asked.alarms.limits)
    done = train.train(asked)
    assert (done.step, done.verdict, done.final_accuracy) == (3, None, 0.2)
    assert done.model is not None


def watched(material, directory, **changes):
    """The alarm actions of a run whose last step has a KL spike, a gradient spike and no spread."""
    config_ = config(material, directory, **changes)
    usual = {"reward": 0.1, "kl": 0.02, "grad_norm": 1.0, "groups/sampled": 8, "groups/zero_std": 8}
    entries = [{"step": s, **usual} for s in range(1, 10)]
    entries.append({"step": 10, **usual, "kl": 9.0, "grad_norm": 99.0})
    write_lines(directory / "metrics.jsonl", [])
    history, said, noted = History(), [], []
    for entry in entries:
        history.add(entry)
    tracker = SimpleNamespace(
        history=history, note=said.append, event=lambda step, event: noted.append(event)
    )
    specs = {"weights": spec.ParamSpec((10**9,), ("embed",), "weights", None)}
    learning = SimpleNamespace(model=SimpleNamespace(specs=specs), check_attention=pytest.fail)
    run = SimpleNamespace(config=config_, checkpoints=None, tracker=tracker, learning=learning)
    return AlarmActions(cast(Any, run)), said, noted


def test_most_severe_action_wins(material, tmp_path):
    actions, said, noted = watched(
        material, tmp_path, alarms__gradient_spike="stop", alarms__kl_spike="pause"
    )
    verdict = actions.check()
    assert verdict is not None
    assert verdict.action == "stop"
    assert verdict.message.startswith("stopped: step 10: gradient-norm spike: gradient norm 99")
    raised = {event["alarm"]: event["action"] for event in noted}
    assert raised == {"gradient_spike": "stop", "kl_spike": "log", "zero_variance": "log"}
    assert len(said) == 3
    assert all("Likely: " in line and "Keys: " in line for line in said)
    advice = "learning_rate is 0.003; usual for adamw and 1e+09 parameters is 3e-07 to 3e-06"
    assert ["KL spike" in line or "gradient" in line for line in said] == [
        advice in line for line in said
    ]
    assert actions.check() is None  # silent for a window


def test_alarms_that_are_off_are_not_logged(material, tmp_path):
    off = {"alarms.kl_spike": "off", "alarms.gradient_spike": "off", "alarms.zero_variance": "off"}
    actions, said, noted = watched(material, tmp_path, **off)
    assert actions.check() is None
    assert said == noted == []


def test_checkpoints_reach_back_over_the_window(material, tmp_path, monkeypatch):
    monkeypatch.setattr(alarms, "LIMITS", Limits())
    plain = config(material, tmp_path)
    assert plain.checkpoints_kept == plain.checkpoint.keep == 2
    rolls = config(material, tmp_path, alarms__diversity="rollback_kl")
    # The newest may be of this step; of the 25 steps before, one in 5 has a checkpoint.
    assert rolls.checkpoints_kept == 6
    # Three probes 25 steps apart, and the step before the first: 51 steps.
    probed = {"alarms.phantom": "rollback_kl", "probe.every": "25"}
    assert config(material, tmp_path, **probed).checkpoints_kept == 13
    monkeypatch.setattr(alarms, "LIMITS", Limits(window=5, not_finite_steps=40))
    long = {"alarms.not_finite": "rollback_kl"}
    assert config(material, tmp_path, **long).checkpoints_kept == 10


def test_the_best_checkpoint_is_kept_for_a_rollback_to_it(material, tmp_path):
    held_out = {"alarms.held_out": "rollback_kl", "checkpoint.keep_best": "0"}
    given = config(material, tmp_path, **held_out)
    with closing(run._make_checkpoints(given)) as checkpoints:
        for step in range(1, given.checkpoints_kept + 3):
            checkpoints.save(step, {"x": jnp.zeros(1)}, host={}, metric=float(step == 1))
        checkpoints.wait()
        assert checkpoints.best() == (1, 1.0)


SWITCHES = {"alarms.phantom": "rollback_precision", "alarms.precision": "fp16_master"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alarms.kl_spike": "rollback_kl", "checkpoint.every": "0"}, r"checkpoint\.every = 0"),
        ({"alarms.phantom": "rollback_precision"}, r"needs alarms\.precision"),
        ({"alarms.precision": "bf16"}, r"'bf16' has other dtypes of master weights"),
        ({"alarms.kl_spike": "reboot"}, r"alarms\.kl_spike = 'reboot'"),
        (
            SWITCHES | {"sampler.name": "vllm", "sampler.url": "http://127.0.0.1:1"},
            r"from f32 to f16, but the servers of sampler\.url keep",
        ),
    ],
)
def test_contradictions_are_named(material, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        config(material, tmp_path, **changes)
