"""Answers to learn from: prompts -> sample -> reward, and dynamic sampling around them."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from jaxrl.advantages import zero_std_groups
from jaxrl.core.batch import Rollout
from jaxrl.data import prompts
from jaxrl.data.prompts import Example
from jaxrl.environments.episodes.episode import environment_reward, episode_metrics, last_turn
from jaxrl.environments.rewards import scoring
from jaxrl.training.rollouts import dynamic_sampling
from jaxrl.training.rollouts.draw import draw
from jaxrl.training.run import ENVIRONMENT, MODEL, Progress, Run

Numbers = dict[str, float]


class Answers(NamedTuple):
    """What a step has to learn from.

    Attributes:
      batch: the answers to learn from, with their rewards.
      sampled: all answers that were sampled for this step, with their rewards.
      numbers: metrics of the sampling and of the rewards.
    """

    batch: list[Rollout]
    sampled: list[Rollout]
    numbers: Numbers


def collect(run: Run, progress: Progress, *, seconds: Numbers) -> Answers:
    """Answers to learn from, with their rewards: one round of sampling, and with dynamic sampling
    as many as it takes, within bounds, to fill the batch with groups that teach something."""
    c = run.config.train
    found, sampled, rounds = progress.pending, list[Rollout](), 0
    rollouts: list[Rollout] = []
    while rounds <= c.refill_rounds and dynamic_sampling.count_groups(found) < c.train_batch:
        with clock(seconds, "time/sample"):
            examples = next_prompts(run, progress)
            rollouts = sample(run, examples, step=progress.step, round_=rounds)
        with clock(seconds, "time/reward"):
            rollouts = reward(run, rollouts, examples)
        found = [*found, *(dynamic_sampling.teaching(rollouts) if c.refill_rounds else rollouts)]
        sampled, rounds = [*sampled, *rollouts], rounds + 1
    numbers = reward_metrics(run, sampled)
    groups = dynamic_sampling.count_groups(found)
    # Where nothing teaches, groups that do not are learnt from: a KL term has its say in them, too.
    batch, progress.pending = dynamic_sampling.choose(found or rollouts, groups=c.train_batch)
    if c.refill_rounds:
        numbers |= {
            "groups/rounds": float(rounds),
            "groups/learnt": float(min(groups, c.train_batch)),
            "groups/kept": float(dynamic_sampling.count_groups(progress.pending)),
        }
    if groups < c.train_batch:
        progress.short_batches += 1
        if progress.short_batches == 1:
            run.tracker.note(
                f"dynamic sampling found {groups} groups of train.train_batch = {c.train_batch} in "
                f"{rounds} rounds and goes on with what there is (groups/learnt): the prompts are "
                "too easy or too hard, or train.refill_rounds is too small"
            )
    return Answers(batch, sampled, numbers)


def next_prompts(run: Run, progress: Progress) -> dict[int, Example]:
    """The prompts of the next round by their number in the run; moves the position in the data."""
    first = progress.position
    progress.position += run.config.train.train_batch
    return prompts_from(run, range(first, progress.position))


def prompts_from(run: Run, numbers: Iterable[int]) -> dict[int, Example]:
    """Prompts by their number in the run."""
    examples = run.prompts.examples
    return {
        number: examples[
            prompts.next_indices(len(examples), position=number, count=1, seed=run.config.seed)[0]
        ]
        for number in numbers
    }


def sample(
    run: Run, examples: Mapping[int, Example], *, step: int, round_: int = 0
) -> list[Rollout]:
    """`group_size` answers to every prompt, without rewards, in the order of the prompts."""
    c = run.config
    params = dataclasses.replace(run.sampling, seed=seed(c.seed, step, round_))
    order = {number: i for i, number in enumerate(examples)}
    # They come as they finish; training must not depend on that.
    drawn = sorted(
        draw(run, examples, params, group_size=c.train.group_size),
        key=lambda one: (order[one.rollout.group], one.place),
    )
    for _, rollout in drawn:
        if (newest := int(rollout.version.max(initial=0))) > step:
            raise RuntimeError(
                f"the sampler answered with policy version {newest} and the learner is at {step}; "
                "the sampler serves another run"
            )
    return [rollout for _, rollout in drawn]


def reward(run: Run, rollouts: Sequence[Rollout], examples: Mapping[int, Example]) -> list[Rollout]:
    """Rollouts with their rewards. One whose reward failed is masked: it teaches nothing. Reward
    functions see the last turn, and nothing of an episode whose environment failed."""
    known = [i for i, r in enumerate(rollouts) if r.episode is None or not r.episode.failed]
    texts = [run.tokenizer.decode(last_turn(rollouts[i]), skip_special_tokens=True) for i in known]
    scored = scoring.score(run.rewards, texts, [examples[rollouts[i].group].record for i in known])
    weights = run.reward_weights
    if run.reward_model is not None:
        values = run.reward_model(rollouts)[known]
        scored = scoring.with_component(scored, MODEL, values=values, weight=weights[MODEL])
    if run.episode_runner is not None:
        values = np.array([environment_reward(rollouts[i]) for i in known])
        scored = scoring.with_component(
            scored, ENVIRONMENT, values=values, weight=weights[ENVIRONMENT]
        )
    if scored.first_failure is not None:
        run.tracker.note(scored.first_failure)
    total = np.full(len(rollouts), np.nan)
    components = np.full((len(rollouts), len(weights)), np.nan)
    total[known] = scored.total
    components[known] = np.stack(list(scored.components.values()), axis=1)
    failed = np.isnan(total)
    return [
        r._replace(
            reward=float(total[i]),
            components=tuple(map(float, components[i])),
            action_mask=r.action_mask & (not failed[i]),
        )
        for i, r in enumerate(rollouts)
    ]


def reward_metrics(run: Run, rollouts: Sequence[Rollout]) -> Numbers:
    """What answers earned: means over those whose reward is known, and counts of the rest.

    Raises:
      RuntimeError: if every reward failed.
    """
    rewards = np.array([r.reward for r in rollouts])
    if np.isnan(rewards).all():
        raise RuntimeError(
            f"every reward of {len(rollouts)} answers failed; the first failure was reported above"
        )
    numbers = {
        "reward": float(np.nanmean(rewards)),
        "reward/std": float(np.nanstd(rewards)),
        "reward/failed": float(np.isnan(rewards).sum()),
        "groups/zero_std": float(zero_std_groups(rewards, np.array([r.group for r in rollouts]))),
    }
    if len(run.reward_weights) > 1:
        components = np.nanmean([r.components for r in rollouts], axis=0)
        names = [f"reward/{name}" for name in run.reward_weights]
        numbers |= dict(zip(names, map(float, components), strict=True))
    return numbers | episode_metrics(rollouts)


@contextmanager
def clock(seconds: Numbers, name: str) -> Iterator[None]:
    """Adds the wall-clock seconds of the block to `seconds[name]`."""
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def seed(seed: int, step: int, request: int) -> int:
    """A seed of its own for every request of a step, the same when the step is done again."""
    return int(np.random.SeedSequence((seed, step, request)).generate_state(1)[0])
