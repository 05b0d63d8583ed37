"""Dynamic sampling with a sampler and rewards written by hand; resuming from JSON."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxrl.core.batch import Rollout
from jaxrl.data.prompts import Example
from jaxrl.sampling.base import Completion
from jaxrl.training.progress import Progress
from jaxrl.training.rollouts import dynamic_sampling
from jaxrl.training.rollouts.collect import collect
from tests.run_config import run_config
from tests.training.rollouts.source import make_source

PROMPTS = 64


class HandMade:
    """Completes with (prompt, index in the group). The rewards of a prompt p differ if p % 4 == 0:
    its first completion earns 1 and its second 0."""

    version = 0

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.asked: list[int] = []

    def sample(self, prompts, params, *, group_size):
        self.seeds.append(params.seed)
        self.asked += [int(p[0]) for p in prompts]
        for i in reversed(range(len(prompts))):
            for j in range(group_size):
                yield Completion(
                    i,
                    j,
                    np.array([prompts[i][0], j], np.int32),
                    np.array([-1.0, np.nan], np.float32),
                    np.full(2, self.version, np.int32),
                    "length" if j else "stop",
                )


def earned(text: str, example: Any) -> float:
    prompt, j = map(int, text.split())
    assert prompt == example["prompt"]
    if prompt % 4 == 1:
        raise ValueError("cannot be scored") if j == 0 else AssertionError
    return float(prompt % 4 == 0 and j == 0)


def hand_made(**train: Any) -> SimpleNamespace:
    own = {f"train.{name}": value for name, value in train.items()}
    config = run_config("nothing", **{"reward.path": "earned", "train.group_size": 2} | own)
    examples = [Example(np.array([i + 1], np.int32), {"prompt": i + 1}, {}) for i in range(PROMPTS)]
    notes: list[str] = []
    sampler = HandMade()
    source = make_source(config, examples, sampler=sampler, reward=earned, note=notes.append)
    return SimpleNamespace(sampler=sampler, source=source, notes=notes)


def steps(run: Any, progress: Progress, count: int) -> list[Any]:
    found = []
    for _ in range(count):
        run.sampler.version = progress.step
        found.append(collect(run.source, progress=progress, seconds={}))
        progress.step += 1
    return found


def prompt_of(rollout: Rollout) -> int:
    return int(rollout.prompt[0])


def test_every_informative_group_is_trained_once():
    run, progress = hand_made(dynamic_sampling_rounds=10), Progress()
    batches = steps(run, progress, 3)
    trained = [prompt_of(r) for answers in batches for r in answers.batch]
    kept = [prompt_of(r) for r in progress.pending]
    informative = [p for p in run.sampler.asked if p % 4 == 0]
    # In the order in which they were sampled, each with its whole group.
    assert trained + kept == [p for p in informative for _ in range(2)]
    assert len(set(informative)) == len(informative)
    for answers in batches:
        assert len(answers.batch) == 4 * 2
        assert len({r.group for r in answers.batch}) == 4
    asked = [len(answers.sampled) for answers in batches]
    assert sum(asked) == 2 * len(run.sampler.asked)
    assert [a.numbers["groups/rounds"] for a in batches] == [n / 8 for n in asked]
    assert batches[-1].numbers["groups/kept"] == len(kept) / 2
    # Every round has its own seed.
    assert len(set(run.sampler.seeds)) == len(run.sampler.seeds)


def test_counts_cover_all_rounds():
    (answers,) = steps(hand_made(dynamic_sampling_rounds=10), Progress(), 1)
    asked = [prompt_of(r) for r in answers.sampled[::2]]
    assert answers.numbers["groups/zero_std"] == sum(p % 4 in (2, 3) for p in asked)
    assert answers.numbers["reward/failed"] == 2 * sum(p % 4 == 1 for p in asked)


def test_without_dynamic_sampling_every_group_is_trained():
    run, progress = hand_made(), Progress()
    (answers,) = steps(run, progress, 1)
    assert [prompt_of(r) for r in answers.batch[::2]] == run.sampler.asked
    assert progress.pending == []
    assert not {name for name in answers.numbers if name.startswith("groups/")} - {
        "groups/zero_std",
        *(f"groups/{kind}" for kind in ("right", "mixed", "wrong")),
    }


def test_short_batches_are_trained_and_reported_once():
    run, progress = hand_made(dynamic_sampling_rounds=1), Progress()
    batches = steps(run, progress, 6)
    short = [a for a in batches if a.numbers["groups/trained"] < 4]
    assert short
    assert progress.short_batches == len(short)
    assert sum("dynamic sampling found" in note for note in run.notes) == 1
    for answers in short:
        assert answers.numbers["groups/rounds"] == 2
        assert (
            len(answers.batch) == 2 * answers.numbers["groups/trained"]
            or not answers.numbers["groups/trained"]
        )


def test_kept_groups_survive_json():
    whole, parts = hand_made(dynamic_sampling_rounds=10), hand_made(dynamic_sampling_rounds=10)
    undisturbed, progress = steps(whole, Progress(), 6), Progress()
    found = []
    for _ in range(6):
        found += steps(parts, progress, 1)
        # All that a checkpoint holds.
        progress = Progress.from_json(json.loads(json.dumps(progress.to_json())))
    assert any(answers.numbers["groups/kept"] for answers in found)
    for a, b in zip(undisturbed, found, strict=True):
        assert a.numbers == b.numbers
        for x, y in zip(a.batch, b.batch, strict=True):
            for u, v in zip(x, y, strict=True):
                np.testing.assert_array_equal(u, v)
                assert getattr(u, "dtype", type(u)) == getattr(v, "dtype", type(v))


def test_truncated_rollout_counts_in_group_only():
    (answers,) = steps(hand_made(dynamic_sampling_rounds=10, mask_truncated=True), Progress(), 1)
    for rollout in answers.batch:
        assert rollout.truncated == (rollout.completion[1] == 1)
        assert rollout.action_mask.any() == (not rollout.truncated)
        assert not np.isnan(rollout.reward)
    # A group without action tokens is not informative.
    masked = [r._replace(action_mask=np.zeros(2, bool)) for r in answers.batch[:2]]
    assert dynamic_sampling.informative(masked) == []
