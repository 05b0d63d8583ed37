"""Rollouts from prompts: completions of a single turn, or episodes with an environment."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxrl.builders.reward_model import RewardModel
from jaxrl.builders.task import TaskData
from jaxrl.builders.teacher import Teacher
from jaxrl.config.training import Config
from jaxrl.core import Rollout
from jaxrl.data import Example
from jaxrl.environments import EpisodeRunner, as_rollout
from jaxrl.sampling import Sampler, SamplingParams
from jaxrl.training.rollouts.groups import GroupWorkers


class RolloutSource(NamedTuple):
    """Samples and scores rollouts."""

    config: Config  # of the run
    task: TaskData  # prompts and reward functions
    sampler: Sampler  # serves the policy
    params: SamplingParams  # sampling parameters, with the seed of the run
    episode_runner: EpisodeRunner | None  # plays episodes; None for completions of a single turn
    reward_model: RewardModel | None
    teacher: Teacher | None
    note: Callable[[str], None]  # shows a line to the user
    workers: GroupWorkers | None = None  # play the groups; None if this process does

    @property
    def greedy(self) -> SamplingParams:
        """The sampling parameters without randomness."""
        return dataclasses.replace(self.params, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


class Generated(NamedTuple):
    """A rollout and its index in its group."""

    index: int
    rollout: Rollout


def generate(
    source: RolloutSource,
    examples: Mapping[int, Example],
    *,
    params: SamplingParams,
    group_size: int,
    scored: bool = False,
) -> Iterator[Generated]:
    """Samples `group_size` rollouts for each example, in the order in which they finish. The keys
    of `examples` are the numbers of their groups. The rollouts have no rewards of functions, unless
    workers play them and `scored` is set."""
    if source.workers is not None:
        for played in source.workers.play(examples, params=params, size=group_size, scored=scored):
            for text in played.notes:
                source.note(text)
            yield from (Generated(i, rollout) for i, rollout in enumerate(played.rollouts))
        return
    mask_truncated = source.config.train.mask_truncated
    if source.episode_runner is None:
        numbers, prompts = list(examples), [example.tokens for example in examples.values()]
        for one in source.sampler.sample(prompts, params, group_size=group_size):
            group, prompt = numbers[one.prompt_index], prompts[one.prompt_index]
            rollout = as_rollout(one, prompt, group=group, mask_truncated=mask_truncated)
            yield Generated(one.sample_index, rollout)
        return
    played = source.episode_runner.run(
        examples, sampler=source.sampler, params=params, group_size=group_size
    )
    if played.first_failure is not None:
        source.note(f"an environment failed: {played.first_failure}")
    for i, rollout in enumerate(played.rollouts):
        if rollout.truncated and mask_truncated:
            masked = np.zeros(len(rollout.completion), bool)
            rollout = rollout._replace(action_mask=masked, branches=())
        yield Generated(i % group_size, rollout)
