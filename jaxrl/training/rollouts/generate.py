"""Rollouts from prompts: completions of a single turn, or episodes with an environment."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxrl.core.batch import Rollout
from jaxrl.data.prompts import Example
from jaxrl.environments.episodes.runner import EpisodeRunner
from jaxrl.environments.episodes.single_turn import as_rollout
from jaxrl.sampling.base import Sampler, SamplingParams


class Generator(NamedTuple):
    """Turns prompts into rollouts.

    Attributes:
      sampler: serves the policy.
      params: sampling parameters, with the seed of the run.
      episode_runner: plays episodes; None for completions of a single turn.
      mask_truncated: nothing is learned from truncated rollouts.
      note: shows a line to the user.
    """

    sampler: Sampler
    params: SamplingParams
    episode_runner: EpisodeRunner | None
    mask_truncated: bool
    note: Callable[[str], None]


class Generated(NamedTuple):
    """A rollout without the rewards of reward functions, and its index in its group."""

    index: int
    rollout: Rollout


def generate(
    generator: Generator,
    examples: Mapping[int, Example],
    *,
    params: SamplingParams,
    group_size: int,
) -> Iterator[Generated]:
    """Samples `group_size` rollouts for each example, in the order in which they finish.

    Args:
      generator: samples the completions.
      examples: by the number of their group.
      params: sampling parameters with the seed of this request.
      group_size: rollouts for each example.
    """
    sampler, episode_runner = generator.sampler, generator.episode_runner
    if episode_runner is None:
        numbers, prompts = list(examples), [example.tokens for example in examples.values()]
        for completion in sampler.sample(prompts, params, group_size=group_size):
            group = numbers[completion.prompt_index]
            rollout = as_rollout(
                completion,
                examples[group].tokens,
                group=group,
                mask_truncated=generator.mask_truncated,
            )
            yield Generated(completion.sample_index, rollout)
        return
    played = episode_runner.run(examples, sampler=sampler, params=params, group_size=group_size)
    if played.first_failure is not None:
        generator.note(f"an environment failed: {played.first_failure}")
    for i, rollout in enumerate(played.rollouts):
        if rollout.truncated and generator.mask_truncated:
            rollout = rollout._replace(action_mask=np.zeros(len(rollout.completion), bool))
        yield Generated(i % group_size, rollout)
