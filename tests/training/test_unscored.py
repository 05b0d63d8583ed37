"""Completions without a reward: wrong when held out, and masked only by parts that count."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxrl.advantages import Outcomes, gdpo
from jaxrl.core import Episode, Rollout
from jaxrl.data.prompts import Example
from jaxrl.environments.episodes.runner import EpisodeResults
from jaxrl.environments.rewards.score import Reward, score
from jaxrl.sampling.base import Completion, SamplingParams
from jaxrl.training.evaluate import Evaluation, evaluate, evaluate_greedily
from jaxrl.training.progress import Progress
from jaxrl.training.rollouts.collect import collect
from jaxrl.training.rollouts.generate import generate
from jaxrl.training.rollouts.score import score_rollouts
from tests.run_config import run_config
from tests.training.rollouts.source import make_source


class Counting:
    """Completes prompt p with the token ids p and the index of the sample."""

    version = 0

    def sample(self, prompts, params, *, group_size):
        for i, prompt in enumerate(prompts):
            for j in range(group_size):
                tokens = np.array([prompt[0], j], np.int32)
                numbers = np.zeros(2, np.float32), np.zeros(2, np.int32)
                yield Completion(i, j, tokens, *numbers, "stop")


EXAMPLES = [Example(np.array([i], np.int32), {}, {}) for i in range(5)]


def right(text: str) -> bool:
    prompt, sample = map(int, text.split())
    return (prompt + sample) % 3 == 0


def rewarding(fails: Callable[[], Any]) -> Callable[..., Any]:
    return lambda text, example: 1.0 if right(text) else fails()


def raises() -> float:
    raise KeyError("solution")


FAILING = {"none": lambda: None, "raises": raises, "nan": lambda: math.nan}


def evaluated(reward: Callable[..., Any]) -> Evaluation:
    config = run_config("nothing", reward__path="earned", train__group_size=2)
    source = make_source(config, EXAMPLES, sampler=Counting(), reward=reward)
    return evaluate(source, EXAMPLES, params=SamplingParams(max_tokens=2), samples=4)


@pytest.mark.parametrize("how", FAILING)
def test_accuracy_of_a_failing_reward_is_that_of_zero(how):
    failing, zero = evaluated(rewarding(FAILING[how])), evaluated(rewarding(lambda: 0.0))
    assert failing.accuracy == zero.accuracy == 7 / 20
    assert (failing.failed, zero.failed) == (13, 0)
    assert zero.failure is None
    assert str(failing.failure).startswith("13 of 20 completions could not be scored and count as")
    assert failing.first_failure in str(failing.failure)


def test_an_accuracy_that_is_no_share_is_told():
    assert evaluated(rewarding(lambda: 0.5)).no_share is None
    told = evaluated(rewarding(lambda: -2.5)).no_share
    assert told is not None
    assert told.startswith("13 of 20 rewards are outside of 0 to 1, such as -2.5, ")


def test_held_out_prompts_that_all_fail_end_the_run():
    config = run_config("nothing", reward__path="earned", train__group_size=2)
    source = make_source(config, EXAMPLES, sampler=Counting(), reward=lambda *_: raises())
    task = source.task._replace(held_out=source.task.prompts)
    with pytest.raises(RuntimeError, match=r"every completion failed to be scored; .*'solution'"):
        evaluate_greedily(source._replace(task=task))


@pytest.mark.parametrize("earned", [1e31, -1e300])
def test_an_environments_reward_is_bounded_as_in_training(earned):
    """Two of 1e308 would make the mean infinite, which no checkpoint takes as its metric."""

    class Played:
        def run(self, examples, *, sampler, params, group_size):
            episodes = [Episode(((0, 2, x),), "done", {}) for x in (earned, 1.0)]
            parts = (np.zeros(2, np.int32), np.zeros(2, np.float32), np.ones(2, bool))
            rollouts = [
                Rollout(example.tokens, *parts, parts[0], group, episode=one)
                for (group, example), one in zip(examples.items(), episodes, strict=True)
            ]
            return EpisodeResults(rollouts, None)

    config = run_config("nothing", environment__name="agent", train__group_size=2)
    source = make_source(config, EXAMPLES, sampler=Counting(), reward=rewarding(raises))
    runner: Any = Played()
    weights = {"environment": 1.0}
    task = source.task._replace(rewards=[], weights=weights)
    source = source._replace(task=task, episode_runner=runner)
    found = evaluate(source, EXAMPLES[:2], params=SamplingParams(max_tokens=2), samples=1)
    assert (found.failed, found.accuracy) == (1, 0.5)
    assert "it must be within +-1e+30" in str(found.failure)
    played = [
        one.rollout
        for one in generate(
            source, dict(enumerate(EXAMPLES[:2])), params=SamplingParams(max_tokens=2), group_size=1
        )
    ]
    trained = score_rollouts(source, played, examples=dict(enumerate(EXAMPLES[:2])))
    assert [math.isnan(r.reward) for r in trained] == [True, False]


@pytest.mark.parametrize("how", FAILING)
@pytest.mark.parametrize("share", ["some", "all"])
def test_a_failing_reward_of_weight_0_changes_nothing(how, share):
    """Only its own metrics tell of it."""

    def watched(text: str, example: Any) -> Any:
        return FAILING[how]() if share == "all" or right(text) else 1.0

    def earned(text: str, example: Any) -> float:
        return float(text.split()[1])

    config = run_config("nothing", reward__path="earned", train__group_size=2)
    found, notes = [], list[str]()
    for second in (watched, lambda text, example: 0.5):
        source = make_source(config, EXAMPLES, sampler=Counting(), reward=earned, note=notes.append)
        rewards = [*source.task.rewards, Reward("watched", second, 0.0)]
        task = source.task._replace(rewards=rewards, weights={"earned": 1.0, "watched": 0.0})
        found.append(collect(source._replace(task=task), progress=Progress(), seconds={}))
    (failing, sound), (note,) = found, notes
    failed = sum(math.isnan(r.components[1]) for r in failing.batch)
    assert failed == (len(failing.batch) if share == "all" else 3)
    for one, other in zip(failing.batch, sound.batch, strict=True):
        assert one.reward == other.reward
        assert one.action_mask.all()
    assert note.startswith(
        f"step 1: reward watched (weight 0): {failed} of {len(failing.batch)} failed, first: "
    )
    own = {"reward/watched", "reward/watched/failed"}
    assert failing.numbers["reward/watched/failed"] == failed
    assert math.isnan(failing.numbers["reward/watched"]) == (share == "all")
    rest = {name: value for name, value in failing.numbers.items() if name not in own}
    assert rest == {name: value for name, value in sound.numbers.items() if name not in own}


def test_a_part_of_weight_0_is_no_part_of_any_sum():
    terms = [
        Reward("good", lambda text, _: float(text), 2.0),
        Reward("bad", lambda *_: raises(), 0.0),
    ]
    scored = score(terms, ["1", "3"], [{}] * 2)
    assert scored.total.tolist() == [2.0, 6.0]
    assert scored.failures == {"good": 0, "bad": 2}
    masks, groups = [np.ones(1, bool)] * 2, np.array([7, 7])
    whole = Outcomes(
        rewards=scored.total,
        groups=groups,
        action_masks=masks,
        components=scored.components,
        weights={"good": 2.0, "bad": 0.0},
    )
    alone = Outcomes(
        rewards=scored.total,
        groups=groups,
        action_masks=masks,
        components={"good": scored.components["good"]},
        weights={"good": 2.0},
    )
    np.testing.assert_array_equal(gdpo(whole), gdpo(alone))
