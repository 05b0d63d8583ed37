"""Sampling while the learner trains: threads, a sampler made by hand, and whole small runs."""

import json
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxrl import train
from jaxrl.config import toml_file
from jaxrl.config.toml_file import ConfigError
from jaxrl.config.training import Config
from jaxrl.data.prompts import Example, Prompts
from jaxrl.environments.rewards.scoring import Reward
from jaxrl.monitoring.tracking.tracking import read_metrics
from jaxrl.sampling.base import ClosedError, Completion, SamplingParams
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.rollouts import stream as stream_module
from jaxrl.training.rollouts.answers import prompts_from
from jaxrl.training.rollouts.stream import Stream
from jaxrl.training.run import Progress
from tests import tiny
from tests.processes import JAXRL

SERVED: Any = {"sampler": {"name": "vllm"}}


class Gated:
    """Answers each prompt once its gate is open, with the version that it is asked at."""

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[int] = []
        self.gates: dict[int, threading.Event] = {}
        self.closed = threading.Event()

    def sample(self, prompts, params, *, group_size):
        version = self.version
        for i, prompt in enumerate(prompts):
            self.asked.append(int(prompt[0]))
            gate = self.gates.get(int(prompt[0]))
            while gate is not None and not gate.wait(0.01):
                if self.closed.is_set():
                    raise ClosedError
            for j in reversed(range(group_size)):
                yield Completion(
                    i,
                    j,
                    np.array([prompt[0], j], np.int32),
                    np.zeros(2, np.float32),
                    np.full(2, version, np.int32),
                    "stop",
                )

    def close(self) -> None:
        self.closed.set()


def hand_made(
    *,
    reward: Any = lambda text, example: float(text[-1]),
    order: str = "begun",
    **tables: Any,
) -> Any:
    """A run with 40 prompts, prompt i is the token i; batches of 2 prompts with 2 answers."""
    config = toml_file.validate(
        Config,
        {
            "model": {"path": "m"},
            "data": {"path": "d.jsonl"},
            "reward": {"path": ["earned"]},
            "train": {"train_batch": 2, "group_size": 2, "steps": 6},
            "rollouts": {"max_staleness": 1, "order": order},
            **tables,
        },
    )
    examples = [Example(np.array([i], np.int32), {"prompt": i}, {}) for i in range(40)]
    notes: list[str] = []
    return SimpleNamespace(
        config=config,
        prompts=Prompts(examples, 0),
        sampler=Gated(),
        sampling=SamplingParams(max_tokens=2),
        tokenizer=SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids))),
        rewards=[Reward("earned", reward, 1.0)],
        reward_model=None,
        reward_weights={"earned": 1.0},
        episode_runner=None,
        tracker=SimpleNamespace(note=notes.append),
        notes=notes,
    )


def streaming(run: Any, progress: Progress) -> Stream:
    return Stream(run, progress, Interrupt())


def prompts_of(run: Any, count: int) -> list[int]:
    """The tokens that are the first prompts of a run."""
    return [int(e.tokens[0]) for e in prompts_from(run, range(count)).values()]


def until_waiting(stream: Stream, *, groups: int) -> None:
    with stream._changed:
        assert stream._changed.wait_for(
            lambda: len(stream._buffer.waiting) == 2 * groups, timeout=250
        )


def learnt(batch: Any) -> list[int]:
    return [r.group for r in batch.batch[::2]]


@pytest.mark.parametrize("tables", [{}, SERVED], ids=["embedded", "served"])
def test_sampler_works_while_the_learner_trains(tables):
    run, progress = hand_made(**tables), Progress()
    with streaming(run, progress) as stream:
        first = stream.collect(seconds={})
        assert learnt(first) == [0, 1]
        # What the learner has not asked for yet is sampled meanwhile, and no more than that.
        until_waiting(stream, groups=2)
        assert len(run.sampler.asked) == 4
        progress.step = run.sampler.version = 1
        second = stream.collect(seconds={})
    assert learnt(second) == [2, 3]
    assert second.numbers["staleness"] == 1
    assert [r.reward for r in second.batch] == [0, 1, 0, 1]  # in the group's own order
    assert progress.counts["learnt"] == 4


def test_a_long_answer_holds_up_nobody_but_its_own_place():
    run, progress = hand_made(**SERVED, order="finished"), Progress()
    run.sampler.gates = {p: threading.Event() for p in range(40)}
    slow = prompts_of(run, 4)[0]
    with streaming(run, progress) as stream:
        while len(run.sampler.asked) < 4:
            time.sleep(0.01)
        for prompt, gate in run.sampler.gates.items():
            if prompt != slow:
                gate.set()
        assert 0 not in learnt(stream.collect(seconds={}))
        assert progress.running.count(0) == 1  # a checkpoint knows what is in flight
        progress.step = run.sampler.version = 1
        run.sampler.gates[slow].set()
        stream.collect(seconds={})


def test_restart_answers_again_what_was_in_flight_and_keeps_what_waited():
    run, progress = hand_made(**SERVED), Progress()
    third = prompts_of(run, 4)[3]
    run.sampler.gates = {third: threading.Event()}
    with streaming(run, progress) as stream:
        stream.collect(seconds={})
        until_waiting(stream, groups=1)
        progress.step = run.sampler.version = 1
        run.sampler.gates[third].set()
        assert learnt(stream.collect(seconds={})) == [2, 3]
        saved = progress.to_json()
    later = Progress.from_json(json.loads(json.dumps(saved)))
    later.step = 2
    run.sampler = Gated()
    run.sampler.version = 2
    with streaming(run, later) as stream:
        assert learnt(stream.collect(seconds={})) == [4, 5]
        later.step = run.sampler.version = 3
        assert learnt(stream.collect(seconds={})) == [6, 7]
    assert later.counts["made"] >= later.counts["learnt"] == 8


def test_a_run_that_goes_back_learns_nothing_of_the_steps_that_it_undid():
    run, progress = hand_made(**SERVED), Progress()
    with streaming(run, progress) as stream:
        numbers = learnt(stream.collect(seconds={}))
        progress.step = run.sampler.version = 1
        until_waiting(stream, groups=2)
        saved = json.loads(json.dumps(progress.to_json()))
        stream.collect(seconds={})
        until_waiting(stream, groups=2)
        # What is drawn from here on is in flight when the run goes back.
        run.sampler.gates = {p: threading.Event() for p in range(40)}
        progress.step = run.sampler.version = 2
        stream.collect(seconds={})
    run.sampler, back = Gated(), Progress.from_json(saved)
    run.sampler.version = 1  # the restored weights, under the checkpoint's step
    with streaming(run, back) as stream:
        for step in range(1, 6):
            back.step = run.sampler.version = step
            batch = stream.collect(seconds={})
            numbers += learnt(batch)
            assert {step - int(v) for r in batch.batch for v in r.version} <= {0, 1}
            kinds = ("learnt", "late", "flat", "waiting")
            made = sum(batch.numbers[f"rollouts/{kind}"] for kind in kinds)
            assert batch.numbers["rollouts/made"] == made
    assert numbers == list(range(12))  # each prompt once, as if nothing had been undone


def test_a_signal_ends_the_wait_and_keeps_what_is_there():
    run, progress, interrupt = hand_made(**SERVED), Progress(), Interrupt()
    slow = prompts_of(run, 1)[0]
    run.sampler.gates = {slow: threading.Event()}
    with Stream(run, progress, interrupt) as stream:
        until_waiting(stream, groups=3)
        interrupt.signum = signal.SIGTERM
        assert stream.collect(seconds={}) is None  # with group 0 still in flight
    assert (progress.running, len(progress.pending)) == ([0], 6)
    assert progress.counts == {"made": 3, "learnt": 0, "late": 0, "flat": 0}


def test_a_reward_that_takes_long_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(stream_module, "LEAVING", 0.1)
    never = threading.Event()
    run = hand_made(reward=lambda text, example: never.wait() or 0.0, **SERVED)
    with streaming(run, Progress()) as stream:
        while len(run.sampler.asked) < 4:
            time.sleep(0.01)
    assert any(thread.is_alive() for thread in stream._threads)
    never.set()
    for thread in stream._threads:
        thread.join()


def test_sampling_and_rewards_are_timed_apart(monkeypatch):
    now = [0.0]  # moves while a reward is computed, and at no other time

    def reward(text: str, example: Any) -> float:
        now[0] += 1.0
        return float(text[-1])

    monkeypatch.setattr(stream_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    run, progress, seconds = hand_made(reward=reward), Progress(), {}
    with streaming(run, progress) as stream:
        until_waiting(stream, groups=4)
        stream.collect(seconds=seconds)
    # Four groups of two answers; of the two that are drawn together one waits for the other.
    assert (seconds["time/reward"], seconds["time/sample"]) == (8, 4)


def test_what_ends_the_sampling_ends_the_run():
    run = hand_made(**SERVED)
    run.sampler.sample = lambda *_, **__: (_ for _ in ()).throw(ConnectionError("no server"))
    with streaming(run, Progress()) as stream, pytest.raises(ConnectionError, match="no server"):
        stream.collect(seconds={})


def test_failed_rewards_of_a_whole_group_cost_that_group_only():
    bad = prompts_of(hand_made(), 1)[0]

    def reward(text: str, example: Any) -> float:
        if example["prompt"] == bad:
            raise ValueError("no reward for this one")
        return float(text[-1])

    run, progress = hand_made(reward=reward, **SERVED), Progress()
    with streaming(run, progress) as stream:
        batch = stream.collect(seconds={})
    assert [np.isnan(r.reward) for r in batch.batch] == [True, True, False, False]
    assert not any(r.action_mask.any() for r in batch.batch[:2])
    assert batch.numbers["reward/failed"] == 2
    assert "no reward for this one" in run.notes[0]


def test_a_mesh_with_the_embedded_sampler_is_refused():
    with pytest.raises(ConfigError, match=r"rollouts\.max_staleness = 1 and a mesh"):
        hand_made(mesh={"data": 2})


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("material")
    tiny.write_checkpoint(directory / "model")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "reward.py").write_text(
        "import itertools, os, pathlib\n"
        "end = pathlib.Path(__file__).with_name('end')\n"
        "calls = itertools.count(1)\n"
        "def fewer(completion, example):\n"
        "    call = next(calls)\n"
        "    if end.exists():\n"
        "        at, signum = map(int, end.read_text().split())\n"
        "        if call >= at:\n"
        "            end.unlink()\n"
        "            os.kill(os.getpid(), signum)\n"
        "    return -float(len(completion))\n"
    )
    return directory


def settings(material: Path, run_dir: Path, **changes: str) -> Config:
    keys = {
        "precision": "fp32",
        "run_dir": str(run_dir),
        "model.path": str(material / "model"),
        "data.path": str(material / "prompts.jsonl"),
        "data.max_prompt_tokens": "24",
        "reward.path": f"{material / 'reward.py'}:fewer",
        "sampling.max_tokens": "8",
        "train.steps": "6",
        "train.train_batch": "2",
        "train.group_size": "2",
        "train.microbatch_tokens": "64",
        "probe.every": "0",
        "checkpoint.every": "1",
        "rollouts.max_staleness": "2",
        **changes,
    }
    return toml_file.load(Config, overrides=list(keys.items()))


def entries_of(run_dir: Path) -> list[dict[str, Any]]:
    return [e for e in read_metrics(run_dir / "metrics.jsonl") if "reward" in e]


def test_a_run_that_is_killed_and_ended_goes_on(material, tmp_path):
    """The whole run, in four parts: what is learnt adds up, and nothing is learnt twice."""
    config = settings(material, tmp_path / "run")
    file, end = tmp_path / "run.toml", material / "end"
    file.write_text(toml_file.dumps(config))
    for answer in (3, 11):  # while the first groups are drawn, and with others waiting
        end.write_text(f"{answer} {signal.SIGKILL}")
        killed = subprocess.run([*JAXRL, "train", str(file)], capture_output=True, text=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    # The last group but one is begun by version 3 at the earliest, so the run has come that far.
    end.write_text(f"13 {signal.SIGTERM}")
    first = train.train(config)
    assert first.signum == signal.SIGTERM
    assert not end.exists()
    saved = entries_of(tmp_path / "run")
    assert saved[-1]["rollouts/learnt"] == 2 * first.step < 12
    second = train.train(config)
    assert second.step == 6
    entries = entries_of(tmp_path / "run")
    assert [e["rollouts/learnt"] for e in entries] == [2, 4, 6, 8, 10, 12]
    for e in entries:
        kinds = ("learnt", "late", "flat", "waiting")
        assert e["rollouts/made"] == sum(e[f"rollouts/{kind}"] for kind in kinds)
        assert 0 <= e["staleness"] <= e["staleness/max"] <= 2
        assert np.isfinite(e["time/wait"])
    assert entries[-1]["rollouts/made"] == 12  # nothing is begun that nobody will learn from
