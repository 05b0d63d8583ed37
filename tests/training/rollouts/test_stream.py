"""Asynchronous rollouts: threads, a sampler written by hand, and whole small runs."""

import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl import train
from jaxrl.builders.layout import make_layout, sampler_layout
from jaxrl.config import toml_file
from jaxrl.config.toml_file import ConfigError
from jaxrl.config.training import Config
from jaxrl.data.prompts import Example
from jaxrl.sampling.base import ClosedError, Completion
from jaxrl.tracking.tracker import read_metrics
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.progress import Progress
from jaxrl.training.rollouts import stream as stream_module
from jaxrl.training.rollouts.collect import prompts_at
from jaxrl.training.rollouts.generate import RolloutSource
from jaxrl.training.rollouts.stream import Stream
from tests import tiny
from tests.processes import ModuleProcess
from tests.run_config import run_config
from tests.training.rollouts.source import make_source

SERVED: Any = {"sampler": {"name": "vllm"}}


class Gated:
    """Completes each prompt once its gate is open, with the version of the request."""

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
    *, reward: Any = lambda text, example: float(text[-1]), order: str = "begun", **tables: Any
) -> Any:
    """A run with 40 prompts, prompt i being the token i; batches of 2 prompts x 2 rollouts."""
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
        config=config, examples=examples, sampler=Gated(), reward=reward, notes=notes
    )


def source_of(run: Any) -> RolloutSource:
    return make_source(
        run.config, run.examples, sampler=run.sampler, reward=run.reward, note=run.notes.append
    )


def streaming(run: Any, progress: Progress, *, interrupt: Interrupt | None = None) -> Stream:
    interrupt = interrupt or Interrupt()
    return Stream(source_of(run), progress, interrupt=interrupt)


def prompts_of(run: Any, count: int) -> list[int]:
    """The tokens that are the first prompts of a run."""
    return [int(e.tokens[0]) for e in prompts_at(source_of(run), range(count)).values()]


def until_waiting(stream: Stream, *, groups: int) -> None:
    with stream._changed:
        assert stream._changed.wait_for(
            lambda: len(stream._buffer.waiting) == 2 * groups, timeout=250
        )


def trained(batch: Any) -> list[int]:
    return [r.group for r in batch.batch[::2]]


@pytest.mark.parametrize("tables", [{}, SERVED], ids=["embedded", "served"])
def test_sampler_works_while_the_learner_trains(tables):
    run, progress = hand_made(**tables), Progress()
    with streaming(run, progress) as stream:
        first = stream.collect(seconds={})
        assert trained(first) == [0, 1]
        # The next batch is sampled ahead, and no more than that.
        until_waiting(stream, groups=2)
        assert len(run.sampler.asked) == 4
        progress.step = run.sampler.version = 1
        second = stream.collect(seconds={})
    assert trained(second) == [2, 3]
    assert second.numbers["staleness"] == 1
    assert [r.reward for r in second.batch] == [0, 1, 0, 1]  # in the group's own order
    assert progress.counts["trained"] == 4


def test_slow_completion_does_not_block_other_groups():
    run, progress = hand_made(**SERVED, order="finished"), Progress()
    run.sampler.gates = {p: threading.Event() for p in range(40)}
    slow = prompts_of(run, 4)[0]
    with streaming(run, progress) as stream:
        while len(run.sampler.asked) < 4:
            time.sleep(0.01)
        for prompt, gate in run.sampler.gates.items():
            if prompt != slow:
                gate.set()
        assert 0 not in trained(stream.collect(seconds={}))
        assert progress.running.count(0) == 1  # a checkpoint knows what is in flight
        progress.step = run.sampler.version = 1
        run.sampler.gates[slow].set()
        stream.collect(seconds={})


def test_resume_keeps_waiting_groups():
    run, progress = hand_made(**SERVED), Progress()
    third = prompts_of(run, 4)[3]
    run.sampler.gates = {third: threading.Event()}
    with streaming(run, progress) as stream:
        stream.collect(seconds={})
        until_waiting(stream, groups=1)
        progress.step = run.sampler.version = 1
        run.sampler.gates[third].set()
        assert trained(stream.collect(seconds={})) == [2, 3]
        saved = progress.to_json()
    later = Progress.from_json(json.loads(json.dumps(saved)))
    later.step = 2
    run.sampler = Gated()
    run.sampler.version = 2
    with streaming(run, later) as stream:
        assert trained(stream.collect(seconds={})) == [4, 5]
        later.step = run.sampler.version = 3
        assert trained(stream.collect(seconds={})) == [6, 7]
    assert later.counts["sampled"] >= later.counts["trained"] == 8


def test_rollback_trains_on_each_prompt_once():
    run, progress = hand_made(**SERVED), Progress()
    with streaming(run, progress) as stream:
        numbers = trained(stream.collect(seconds={}))
        progress.step = run.sampler.version = 1
        until_waiting(stream, groups=2)
        saved = json.loads(json.dumps(progress.to_json()))
        stream.collect(seconds={})
        until_waiting(stream, groups=2)
        # Everything sampled from here on is in flight at the rollback.
        run.sampler.gates = {p: threading.Event() for p in range(40)}
        progress.step = run.sampler.version = 2
        stream.collect(seconds={})
    run.sampler, back = Gated(), Progress.from_json(saved)
    run.sampler.version = 1  # the restored weights, under the checkpoint's step
    with streaming(run, back) as stream:
        for step in range(1, 6):
            back.step = run.sampler.version = step
            batch = stream.collect(seconds={})
            numbers += trained(batch)
            assert {step - int(v) for r in batch.batch for v in r.version} <= {0, 1}
            kinds = ("trained", "stale", "zero_variance", "waiting")
            made = sum(batch.numbers[f"rollouts/{kind}"] for kind in kinds)
            assert batch.numbers["rollouts/sampled"] == made
    assert numbers == list(range(12))  # each prompt once, as without a rollback


def test_signal_keeps_finished_groups():
    run, progress, interrupt = hand_made(**SERVED), Progress(), Interrupt()
    slow = prompts_of(run, 1)[0]
    run.sampler.gates = {slow: threading.Event()}
    with streaming(run, progress, interrupt=interrupt) as stream:
        until_waiting(stream, groups=3)
        interrupt.signum = signal.SIGTERM
        assert stream.collect(seconds={}) is None  # with group 0 still in flight
    assert (progress.running, len(progress.pending)) == ([0], 6)
    assert progress.counts == {"sampled": 3, "trained": 0, "stale": 0, "zero_variance": 0}


def test_a_long_wait_is_noted(monkeypatch):
    run, gate = hand_made(**SERVED), threading.Event()
    run.sampler.gates = {prompts_of(run, 1)[0]: gate}
    noted = source_of(run)._replace(note=lambda line: gate.set() or run.notes.append(line))
    with Stream(noted, Progress(), interrupt=Interrupt()) as stream:
        until_waiting(stream, groups=3)
        monkeypatch.setattr(stream_module, "PATIENCE", 0.01)
        assert trained(stream.collect(seconds={})) == [0, 1]
    assert "step 1 has waited" in run.notes[0]
    assert "s for 2 groups: 3 are done, 1 are being sampled" in run.notes[0]


def test_too_few_completions_end_the_run(monkeypatch):
    run = hand_made(**SERVED)
    whole = run.sampler.sample
    run.sampler.sample = lambda *a, **k: itertools.islice(whole(*a, **k), 1)
    with (
        streaming(run, Progress()) as stream,
        pytest.raises(RuntimeError, match=r"ended without all completions of prompts \[[01]\]"),
    ):
        stream.collect(seconds={})


def test_slow_reward_does_not_delay_the_exit(monkeypatch):
    monkeypatch.setattr(stream_module, "GRACE", 0.1)
    begun, never = threading.Event(), threading.Event()

    def reward(text: str, example: Any) -> float:
        begun.set()
        return never.wait() or 0.0

    run = hand_made(reward=reward, **SERVED)
    with streaming(run, Progress()) as stream:
        assert begun.wait(250)
    assert any(thread.is_alive() for thread in stream._threads)
    never.set()
    for thread in stream._threads:
        thread.join()


def test_sampling_and_rewards_are_timed_apart(monkeypatch):
    now = [0.0]  # moves while a reward is computed, and at no other time
    first = threading.Event()  # a group has its rewards

    def reward(text: str, example: Any) -> float:
        now[0] += 1.0
        return float(text[-1])

    monkeypatch.setattr(stream_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    train = {"train_batch": 2, "group_size": 2, "steps": 1}
    run, progress, seconds = hand_made(reward=reward, train=train), Progress(), {}
    run.sampler.gates = {prompts_of(run, 2)[1]: first}
    with streaming(run, progress) as stream:
        until_waiting(stream, groups=1)
        first.set()
        stream.collect(seconds=seconds)
    # Two groups of two rollouts: the second is sampled until the first has its rewards.
    assert (seconds["time/reward"], seconds["time/sample"]) == (4, 2)


def test_sampler_error_ends_the_run():
    run = hand_made(**SERVED)
    run.sampler.sample = lambda *_, **__: (_ for _ in ()).throw(ConnectionError("no server"))
    with streaming(run, Progress()) as stream, pytest.raises(ConnectionError, match="no server"):
        stream.collect(seconds={})


def test_failed_rewards_mask_their_group_only():
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
    assert "2 of 4 failed, first: " in run.notes[0]
    assert "no reward for this one" in run.notes[0]


def test_mesh_with_embedded_sampler_is_refused():
    with pytest.raises(ConfigError, match=r"rollouts\.max_staleness = 1 on a mesh"):
        hand_made(mesh={"data": 2})


def test_sampler_takes_the_last_devices():
    config = hand_made(mesh={"data": 5}, sampler={"devices": 3, "tensor": 3}).config
    layout = make_layout(config.mesh, apart={"sampler.devices": 3})
    own = sampler_layout(config.sampler, layout, tiny.model())
    assert [*layout.mesh.devices.flat, *own.mesh.devices.flat] == jax.devices()
    assert own.mesh.shape["tensor"] == 3
    with pytest.raises(ValueError, match=r"sampler\.devices = 8 leaves the learner none of 8"):
        make_layout(config.mesh, apart={"sampler.devices": 8})
    uneven = hand_made(mesh={"data": 5}, sampler={"devices": 3, "tensor": 2}).config
    with pytest.raises(ValueError, match=r"sampler\.tensor = 2: mesh data=-1 x tensor=2"):
        sampler_layout(uneven.sampler, layout, tiny.model())
    with pytest.raises(
        ConfigError, match=r"sampler\.devices = 3 applies to a sampler in this program"
    ):
        hand_made(sampler={"devices": 3, "name": "vllm"})


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
    own = {
        "run_dir": run_dir,
        "data.max_prompt_tokens": 24,
        "reward.path": f"{material}/reward.py:fewer",
        "train.steps": 6,
        "train.train_batch": 2,
        "train.group_size": 2,
        "optimizer.learning_rate": 1e-6,
        "checkpoint.every": 1,
        "rollouts.max_staleness": 2,
    }
    return run_config(material, **own | changes)


def entries_of(run_dir: Path) -> list[dict[str, Any]]:
    return [e for e in read_metrics(run_dir / "metrics.jsonl") if "reward" in e]


def test_killed_and_stopped_run_resumes(material, tmp_path):
    """A whole run in four parts: counts add up, and nothing is trained on twice."""
    config = settings(material, tmp_path / "run")
    file, log, end = tmp_path / "run.toml", tmp_path / "log", material / "end"
    file.write_text(toml_file.dumps(config))
    for answer in (3, 11):  # while the first groups are drawn, and with others waiting
        end.write_text(f"{answer} {signal.SIGKILL}")
        killed = ModuleProcess("jaxrl", ["train", str(file)], output=log, environment=os.environ)
        assert killed.wait() == -signal.SIGKILL, log.read_text()
    # After two answers to the trial calls, those of six groups may come before a step is done. The
    # seventh group is started after one, whatever step the killed runs have saved.
    end.write_text(f"15 {signal.SIGTERM}")
    first = train.train(config)
    assert first.signum == signal.SIGTERM
    assert not end.exists()
    saved = entries_of(tmp_path / "run")
    assert saved[-1]["rollouts/trained"] == 2 * first.step < 12
    second = train.train(config)
    assert second.step == 6
    entries = entries_of(tmp_path / "run")
    assert [e["rollouts/trained"] for e in entries] == [2, 4, 6, 8, 10, 12]
    for e in entries:
        kinds = ("trained", "stale", "zero_variance", "waiting")
        assert e["rollouts/sampled"] == sum(e[f"rollouts/{kind}"] for kind in kinds)
        assert 0 <= e["staleness"] <= e["staleness/max"] <= 2
        assert np.isfinite(e["time/wait"])
    assert entries[-1]["rollouts/sampled"] == 12  # no group is started in vain


def test_sampler_devices_work_beside_a_mesh(material, tmp_path):
    changes = {"mesh.data": "4", "sampler.devices": "4", "rollouts.max_staleness": "1"}
    changes |= {"train.steps": "3", "checkpoint.every": "0"}
    assert train.train(settings(material, tmp_path / "run", **changes)).step == 3
    entries = entries_of(tmp_path / "run")
    assert [e["rollouts/trained"] for e in entries] == [2, 4, 6]
    assert all(e["staleness/max"] <= 1 for e in entries)
    # The weights that were sampled are the learner's of that version.
    assert all(abs(e["mismatch/k3_kl"]) < 1e-8 for e in entries if not e["staleness/max"])
