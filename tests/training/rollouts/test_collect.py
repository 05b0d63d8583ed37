"""Synchronous rollouts, with a sampler and rewards written by hand."""

import json
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxrl.core.batch import Rollout, to_json
from jaxrl.data.prompts import Example
from jaxrl.environments.rewards.batches import batched
from jaxrl.sampling.base import Completion
from jaxrl.training.progress import Progress
from jaxrl.training.rollouts.collect import RolloutBatch, collect, step_metrics
from tests import tiny
from tests.run_config import run_config
from tests.training.rollouts.source import make_source


class Backwards:
    """Completes the last prompt first; after each group it waits for `seen`, if there is one."""

    version = 0

    def __init__(self, seen: threading.Event | None = None) -> None:
        self._seen = seen

    def sample(self, prompts, params, *, group_size):
        for i in reversed(range(len(prompts))):
            for j in reversed(range(group_size)):
                tokens = np.array([prompts[i][0], j], np.int32)
                numbers = np.zeros(2, np.float32), np.zeros(2, np.int32)
                yield Completion(i, j, tokens, *numbers, "stop")
            assert self._seen is None or self._seen.wait(250), "no reward of a complete group"


def collected(sampler: Any, *, reward: Any, notes: list[str] | None = None) -> RolloutBatch:
    """Collects 4 prompts x 2 rollouts; the reward of token ids [p, j] is 10 p + j."""
    config = run_config("nothing", reward__path="earned", train__group_size=2)
    examples = [Example(np.array([i], np.int32), {"prompt": i}, {}) for i in range(4)]
    note = ([] if notes is None else notes).append
    source = make_source(config, examples, sampler=sampler, reward=reward, note=note)
    return collect(source, progress=Progress(), seconds={})


def test_throughput_counts_all_sequences_of_an_episode():
    seconds = {"time/step": 4.0, "time/sample": 2.0, "time/learn": 1.0}
    tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: str(ids))
    plain = tiny.rollouts(4)
    branched = [one._replace(branches=(one, one)) for one in plain]

    def speeds(batch: list[Rollout]) -> list[float]:
        numbers = step_metrics(RolloutBatch(batch, batch, {}), seconds, tokenizer=tokenizer)
        return [numbers["tokens_per_second" + part] for part in ("", "/sample", "/learn")]

    assert speeds(branched) == [3 * speed for speed in speeds(plain)]


class Versioned:
    """Completes prompts in order with the present version of the policy."""

    version = 0

    def sample(self, prompts, params, *, group_size):
        for i, prompt in enumerate(prompts):
            for j in range(group_size):
                tokens = np.array([prompt[0], j], np.int32)
                numbers = np.zeros(2, np.float32), np.full(2, self.version, np.int32)
                yield Completion(i, j, tokens, *numbers, "stop")


def test_partial_refresh_mixes_new_groups_with_the_last_batchs():
    """Half of each batch is new; the other half is as it was sampled and scored, one version old,
    and is trained on twice in all. A checkpoint between two steps changes nothing."""
    config = run_config(
        "nothing", reward__path="earned", train__group_size=2, rollouts__replay_share=0.5
    )
    examples = [Example(np.array([i], np.int32), {"prompt": i}, {}) for i in range(20)]
    sampler, progress = Versioned(), Progress()
    source = make_source(config, examples, sampler=sampler, reward=lambda *_: 1.0)
    batches = []
    for step in range(4):
        sampler.version = progress.step = step
        batches.append(collect(source, progress=progress, seconds={}))
        progress = Progress.from_json(json.loads(json.dumps(progress.to_json())))
    seen = [list(dict.fromkeys(r.group for r in batch.batch)) for batch in batches]
    assert seen == [[0, 1, 2, 3], [4, 0, 5, 1], [6, 4, 7, 5], [8, 6, 9, 7]]
    assert progress.position == 10
    for step, batch in enumerate(batches):
        new = {r.group for r in batch.sampled}
        assert len(batch.batch) == 8
        for rollout in batch.batch:
            assert set(rollout.version) == {step - (rollout.group not in new)}
        assert batch.numbers["rollouts/replayed"] == (2 if step else 0)
        assert batch.numbers["staleness"] == (0.5 if step else 0)
        assert batch.numbers["staleness/max"] == (1 if step else 0)
    first = {(r.group, tuple(r.completion)): r for r in batches[1].batch}
    for again in batches[2].batch:
        if again.version[0] == 1:
            assert to_json(again) == to_json(first[again.group, tuple(again.completion)])


def test_every_step_samples_with_partial_refresh_and_dynamic_sampling():
    """The first batch has no groups to replay, so it leaves more surplus groups than the next takes
    new ones; those beyond are dropped and counted."""
    calls: list[str] = []

    def reward(text: str, example: Any) -> float:
        calls.append(text)
        return float(text[-1]) if len(calls) > 2 else 0.0  # the first group's are equal

    config = run_config(
        "nothing",
        reward__path="earned",
        train__group_size=2,
        rollouts__replay_share=0.5,
        train__dynamic_sampling_rounds=1,
    )
    examples = [Example(np.array([i], np.int32), {"prompt": i}, {}) for i in range(20)]
    sampler, progress = Versioned(), Progress()
    source = make_source(config, examples, sampler=sampler, reward=reward)
    names, seen = ("groups/kept", "groups/dropped", "staleness/max"), []
    for step in range(3):
        sampler.version = progress.step = step
        numbers = collect(source, progress=progress, seconds={}).numbers
        seen.append([numbers[name] for name in names])
    assert seen == [[1, 2, 0], [1, 0, 1], [1, 0, 2]]


def worth(text: str, example: Any) -> float:
    prompt, sample = map(int, text.split())
    assert example["prompt"] == prompt
    return 10.0 * prompt + sample


def test_scoring_overlaps_sampling():
    seen = threading.Event()

    def reward(text: str, example: Any) -> float:
        seen.set()
        return worth(text, example)

    batch = collected(Backwards(seen), reward=reward).batch
    assert [r.group for r in batch] == [0, 0, 1, 1, 2, 2, 3, 3]  # in the prompts' order
    assert [r.reward for r in batch] == [10 * r.completion[0] + i % 2 for i, r in enumerate(batch)]


def test_batched_rewards_see_all_completions_at_once():
    calls: list[int] = []

    @batched
    def reward(texts: list[str], examples: Any) -> list[float]:
        calls.append(len(texts))
        return [worth(*pair) for pair in zip(texts, examples, strict=True)]

    one_by_one = collected(Backwards(), reward=worth).batch
    assert [r.reward for r in collected(Backwards(), reward=reward).batch] == [
        r.reward for r in one_by_one
    ]
    assert calls == [8]


def test_first_failure_is_noted_once():
    notes: list[str] = []

    def reward(text: str, example: Any) -> float:
        if text.endswith("1"):
            raise ValueError("no reward for this one")
        return worth(text, example)

    batch = collected(Backwards(), reward=reward, notes=notes)
    assert batch.numbers["reward/failed"] == 4
    assert len(notes) == 1
    assert notes[0].startswith("step 1: reward earned: 4 of 8 failed, first: reward earned")
    assert "no reward for this one" in notes[0]


@pytest.mark.parametrize(("off", "said"), [(1, "serves policy version 1"), (-1, "version -1 and")])
def test_only_the_learners_own_version_is_trained_on(off: int, said: str):
    sampler = Backwards()
    made = sampler.sample

    def shifted(*args: Any, **kwargs: Any) -> Any:
        for one in made(*args, **kwargs):
            versions = one.versions.copy()
            versions[-1] += off
            yield one._replace(versions=versions)

    sampler.sample = shifted
    with pytest.raises(RuntimeError, match=said):
        collected(sampler, reward=worth)
