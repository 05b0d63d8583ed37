"""Multi-turn episodes: appended tokens, masks, limits, and the isolation of failures."""

import asyncio
import dataclasses
import itertools
import re
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl.core.batch import from_json, to_json
from jaxrl.core.packing import pack
from jaxrl.core.precision import PRESETS
from jaxrl.data.prompts import Example
from jaxrl.environments.episodes import open_file_limit, runner
from jaxrl.environments.episodes.base import EpisodeLimits, Step
from jaxrl.environments.episodes.episode import last_turn
from jaxrl.environments.episodes.runner import ContinuousScheduler, EpisodeRunner, LockstepScheduler
from jaxrl.environments.episodes.single_turn import as_rollout
from jaxrl.environments.isolation import calls
from jaxrl.sampling.base import Completion, SamplingParams, Turn
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from tests import tiny
from tests.environments.deadlines import SECONDS, expire

PARAMS = SamplingParams(max_tokens=40, stop=((1,),), seed=3)
LIMITS = EpisodeLimits(4, 40, max_prompt_tokens=20, timeout=SECONDS, vocab_size=64)
EXAMPLES = {
    number: Example(np.arange(2, 2 + n, dtype=np.int32), {"prompt": n}, {})
    for number, n in ((7, 3), (9, 5), (12, 8))
}
SCHEDULERS = pytest.mark.parametrize("scheduler", [LockstepScheduler, ContinuousScheduler])


class ScriptedSampler:
    """Samples [10 + prompt, 20 + sample, 30 + turn, 1] with log-probs -1, -2, ... and versions that
    rise with every token."""

    def __init__(self) -> None:
        self.requests: list[list[Turn]] = []
        self.version = 0

    def sample_turns(self, turns, params):
        self.requests.append(list(turns))
        for prompt, (context, i, j, most, *_) in enumerate(turns):
            del prompt
            tokens = np.array([10 + i, 20 + j, 30 + np.sum(context == 1), 1], np.int32)[:most]
            size = len(tokens)
            yield Completion(
                i,
                j,
                tokens,
                -np.arange(1, size + 1, dtype=np.float32),
                np.arange(size, dtype=np.int32) + self.version,
                "stop" if size == 4 else "length",
            )


class Talk:
    """Observes [40, 41] twice, rewards each turn with a quarter and ends with the third."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []

    async def reset(self, example):
        self.example = example
        return example.tokens

    async def step(self, completion):
        await asyncio.sleep(0)
        self.heard.append(completion.tolist())
        return Step([40, 41], 0.25, len(self.heard) == 3, {"heard": len(completion)})


def run(make: Any, *, scheduler=LockstepScheduler, limits=LIMITS, sampler=None, **changes: Any):
    params = dataclasses.replace(PARAMS, **changes)
    sampler = sampler or ScriptedSampler()
    episodes = EpisodeRunner(make, limits, scheduler)
    return episodes.run(EXAMPLES, sampler=sampler, params=params, group_size=2)


@SCHEDULERS
def test_rollout_holds_turns_and_masked_observations(scheduler):
    rollouts, failure = run(Talk, scheduler=scheduler)
    assert failure is None
    assert [r.group for r in rollouts] == [7, 7, 9, 9, 12, 12]
    for k, r in enumerate(rollouts):
        i, j = divmod(k, 2)
        turns = [[10 + i, 20 + j, 30 + n, 1] for n in range(3)]
        seen = [40, 41]
        assert r.prompt.tolist() == EXAMPLES[r.group].tokens.tolist()
        assert r.completion.tolist() == turns[0] + seen + turns[1] + seen + turns[2]
        assert r.action_mask.tolist() == [True] * 4 + ([False] * 2 + [True] * 4) * 2
        assert r.logprobs.tolist() == [-1, -2, -3, -4] + [0, 0, -1, -2, -3, -4] * 2
        # An observation has the version of the turn before it.
        assert r.version.tolist() == [0, 1, 2, 3] + [3, 3, 0, 1, 2, 3] * 2
        assert r.episode is not None
        assert r.episode.turns == ((0, 4, 0.25), (6, 10, 0.25), (12, 16, 0.25))
        assert r.episode.end == "done"
        assert r.episode.metrics == {"heard": 12}
        assert not r.truncated
        assert last_turn(r).tolist() == turns[2]
        again = from_json(to_json(r))
        assert all(np.array_equal(x, y) for x, y in zip(r[:5], again[:5], strict=True))
        assert again[5:6] == r[5:6]
        assert again.episode == r.episode


def test_lockstep_round_is_one_request():
    rounds, requests = ScriptedSampler(), ScriptedSampler()
    run(Talk, sampler=rounds)
    assert [len(r) for r in rounds.requests] == [6, 6, 6]
    run(Talk, sampler=requests, scheduler=ContinuousScheduler)
    assert sorted(len(r) for r in requests.requests)[-3:] == [2, 2, 2]
    assert sum(len(r) for r in requests.requests) == 18
    # The router finds the server that has it in its cache.
    prompts = [example.tokens.tolist() for example in EXAMPLES.values()]
    for turn in itertools.chain(*rounds.requests, *requests.requests):
        assert turn.context[: turn.prompt_length].tolist() == prompts[turn.prompt_index]


def test_slow_environment_delays_no_other():
    freed = threading.Event()

    class Waits(Talk):
        async def step(self, completion):
            if completion[0] == 10 and completion[1] == 20:
                assert freed.wait(250)
            if completion[0] == 12 and len(self.heard) == 2:
                freed.set()
            return await super().step(completion)

    rollouts, _ = run(Waits, scheduler=ContinuousScheduler)
    assert all(r.episode is not None and r.episode.end == "done" for r in rollouts)


@pytest.mark.parametrize(
    ("limits", "end", "length"),
    [
        ({"max_turns": 2}, "max_turns", 10),
        ({"max_tokens": 16}, "done", 16),
        ({"max_tokens": 15}, "max_tokens", 15),  # the last turn is truncated
        ({"max_tokens": 12}, "max_tokens", 10),  # room for an observation but for no turn after it
        ({"max_tokens": 3}, "max_tokens", 3),
    ],
)
def test_limited_episode_ends_with_a_turn(limits, end, length):
    rollouts, failure = run(Talk, limits=LIMITS._replace(**limits))
    assert failure is None
    for r in rollouts:
        assert r.episode is not None
        assert (r.episode.end, len(r.completion)) == (end, length)
        assert r.truncated == (end != "done")
        assert r.action_mask[-1]


class OnAnotherDevice:
    def __array__(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


class Unreadable(dict):
    def items(self):
        raise RuntimeError("no items")


class Breaks(Talk):
    """Fails as `how` says after the first turn of one episode: prompt 1, sample 0."""

    how = ""

    async def step(self, completion):
        if self.how != "reset" and completion[:2].tolist() == [11, 20]:
            return await self.misbehave()
        return await super().step(completion)

    async def misbehave(self) -> Any:
        if self.how == "raises":
            raise KeyError("what")
        if self.how == "exits":
            raise SystemExit(3)
        if self.how in ("hangs", "blocks"):
            expire()
        if self.how == "hangs":
            await asyncio.sleep(1000)
        if self.how == "blocks":
            time.sleep(20)
        return {
            "nothing": None,
            "text": Step("hello"),
            "floats": Step([1.5]),
            "strange ids": Step([64]),
            "no number": Step([2], float("nan")),
            "no end": (0.5, [2], "yes"),
            "no float": Step([2], 10**400),
            "no float counted": Step([2], metrics={"n": 10**400}),
            "no array": Step(OnAnotherDevice()),
            "no mapping": Step([2], metrics=Unreadable()),
        }[self.how]


@SCHEDULERS
@pytest.mark.parametrize(
    ("how", "end", "said"),
    [
        ("raises", "error", " in misbehave: KeyError: 'what'"),
        ("exits", "error", " in misbehave: SystemExit: 3"),
        ("hangs", "timeout", "step took longer than 100 s"),
        ("blocks", "timeout", "step took longer than 100 s"),
        ("nothing", "invalid", "returned None, expected a Step"),
        ("text", "invalid", "observation is 'hello', expected token ids"),
        ("floats", "invalid", "observation is [1.5]"),
        ("strange ids", "invalid", "token ids from 64 to 64; the policy's range from 0 to 63"),
        ("no number", "invalid", "reward = nan"),
        ("no end", "invalid", "done = 'yes'"),
        ("no float", "invalid", "reward = 1000"),
        ("no float counted", "invalid", "metrics = {'n': 1000"),
        ("no array", "invalid", "cannot be read: TypeError(\"can't convert cuda"),
        ("no mapping", "invalid", "cannot be read: RuntimeError('no items')"),
    ],
)
def test_failing_environment_affects_its_episode_only(watched, scheduler, how, end, said):
    whole, _ = run(Talk, scheduler=scheduler)
    rollouts, failure = run(type("B", (Breaks,), {"how": how}), scheduler=scheduler)
    assert failure is not None
    assert said in failure
    assert re.match(r"(step failed: )?tests/environments/test_runner\.py:\d+ in \w+: ", failure)
    for k, (r, undisturbed) in enumerate(zip(rollouts, whole, strict=True)):
        assert r.episode is not None
        if k != 2:
            assert to_json(r) == to_json(undisturbed)
        else:
            assert r.episode.end == end
            assert r.episode.failed
            assert not r.action_mask.any()
            assert r.completion.tolist() == [11, 20, 30, 1]


def test_environment_calls_have_own_deadlines():
    """`hold_processor` finds and pauses it."""
    deadlines = []

    class Counted(Talk):
        async def reset(self, example):
            deadlines.append(calls._deadline.get())
            return await super().reset(example)

        async def step(self, completion):
            deadlines.append(calls._deadline.get())
            return await super().step(completion)

    run(Counted)
    assert None not in deadlines
    assert len(set(map(id, deadlines))) == len(deadlines) == 6 * (1 + 3)


@SCHEDULERS
def test_prompts_are_chunked_by_open_files(scheduler, monkeypatch):
    """3 prompts with 2 episodes each: at most 2 prompts at once, with the same result."""
    whole, _ = run(Talk, scheduler=scheduler)
    open_, most, lock = [0], [], threading.Lock()

    class Counted(Talk):
        async def reset(self, example):
            with lock:
                open_[0] += 1
                most.append(open_[0])
            return await super().reset(example)

        async def step(self, completion):
            step = await super().step(completion)
            with lock:
                open_[0] -= step.done
            return step

    monkeypatch.setattr(runner, "max_open_episodes", lambda: 5)
    some, failure = run(Counted, scheduler=scheduler)
    assert failure is None
    assert max(most) <= 4
    assert list(map(to_json, some)) == list(map(to_json, whole))


def test_runners_share_the_open_file_limit(monkeypatch):
    monkeypatch.setattr(open_file_limit, "_MOST_FILES", 900)
    limits = [(300, 1024), (300, 600), (700, 700), (2000, 2000), (-1, -1)]
    for soft, hard in limits:
        asked = []
        monkeypatch.setattr(open_file_limit.resource, "getrlimit", lambda _, now=(soft, hard): now)
        monkeypatch.setattr(
            open_file_limit.resource, "setrlimit", lambda _, to, asked=asked: asked.append(to)
        )
        found = open_file_limit.max_open_episodes()
        expected = {300: min(hard, 900), 700: 700, 2000: 2000, -1: 900}[soft]
        assert found == expected // 6
        assert asked == ([(expected, hard)] if soft == 300 else [])
    monkeypatch.setattr(open_file_limit, "max_open_episodes", lambda: 4)
    entered, leave = threading.Event(), threading.Event()

    def holds_three():
        with open_file_limit.reserve_files(3):
            entered.set()
            leave.wait(250)

    thread = threading.Thread(target=holds_three)
    thread.start()
    assert entered.wait(250)
    with open_file_limit.reserve_files(1):
        threading.Timer(0.2, leave.set).start()
        with open_file_limit.reserve_files(3):  # granted when the others have left
            assert leave.is_set()
    thread.join()


def test_failed_reset_leaves_empty_completion():
    class NoPrompt(Talk):
        def reset(self, example):
            if len(example.tokens) == 5:
                return []
            return example.tokens  # `def` works as well as `async def`

    rollouts, failure = run(NoPrompt)
    assert failure is not None
    assert "a prompt of 0 tokens" in failure
    assert [r.episode is not None and r.episode.end for r in rollouts[2:4]] == ["invalid"] * 2
    assert all(len(r.completion) == 0 for r in rollouts[2:4])
    assert all(len(r.completion) == 16 for r in rollouts[:2] + rollouts[4:])


def test_observations_carry_no_scores():
    rollouts, _ = run(Talk)
    mask = rollouts[0].action_mask
    odd = [r._replace(logprobs=np.where(mask, r.logprobs, np.nan)) for r in rollouts]
    rows = [[0, 1, 2], [3, 4, 5]]
    one = pack(rollouts, [np.where(mask, 0.5, 0.0)] * 6, rows=rows, row_length=80)
    two = pack(odd, [np.where(mask, 0.5, 1e9)] * 6, rows=rows, row_length=80)
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert np.sum(one.action_mask) == 6 * 12


@SCHEDULERS
def test_sampler_error_ends_all_episodes(scheduler):
    class Gone(ScriptedSampler):
        def sample_turns(self, turns, params):
            raise ConnectionError("no server")

    with pytest.raises(ConnectionError, match="no server"):
        run(Talk, scheduler=scheduler, sampler=Gone())


@pytest.fixture(scope="module")
def sampler() -> EmbeddedSampler:
    return EmbeddedSampler(tiny.model(), tiny.params(), precision=PRESETS["fp32"], version=4)


class Single:
    async def reset(self, example):
        return example.tokens

    async def step(self, completion):
        return Step(reward=0.0, done=True)


def test_single_turn_episode_equals_plain_rollout(sampler):
    found, _ = run(Single, sampler=sampler)
    prompts = [e.tokens for e in EXAMPLES.values()]
    plain = sorted(sampler.sample(prompts, PARAMS, group_size=2), key=lambda c: c[:2])
    expected = [
        as_rollout(c, EXAMPLES[n].tokens, group=n)
        for c, n in zip(plain, np.repeat(list(EXAMPLES), 2).tolist(), strict=True)
    ]
    assert {c.finish_reason for c in plain} == {"stop", "length"}
    for one, other in zip(found, expected, strict=True):
        assert to_json(one._replace(episode=None)) == to_json(other)
    advantages = [float(i) for i in range(6)]
    rows = [[0, 1], [2, 3], [4, 5]]
    batches = [pack(r, advantages, rows=rows, row_length=100) for r in (found, expected)]
    jax.tree.map(np.testing.assert_array_equal, *batches)


def test_failed_episode_changes_no_other(sampler):
    class Echo(Talk):
        async def step(self, completion):
            assert (len(self.example.tokens), len(self.heard)) != self.stumbles
            return await super().step(completion)

        stumbles: Any = None

    whole, _ = run(Echo, sampler=sampler)
    failing = type("Failing", (Echo,), {"stumbles": (3, 0)})
    broken, _ = run(failing, sampler=sampler)
    assert [r.episode is not None and r.episode.failed for r in broken] == [True] * 2 + [False] * 4
    for one, other in zip(whole[2:], broken[2:], strict=True):
        np.testing.assert_array_equal(one.completion, other.completion)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert max(len(r.episode.turns) for r in whole if r.episode is not None) > 1
