"""Rollouts from prompts: answers of a single turn, or episodes with an environment."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxrl.core.batch import Rollout
from jaxrl.data.prompts import Example
from jaxrl.sampling.base import Completion, SamplingParams
from jaxrl.training.run import Run


class Drawn(NamedTuple):
    """A rollout without the rewards of reward functions, and its place within its group."""

    place: int
    rollout: Rollout


def draw(
    run: Run, examples: Mapping[int, Example], params: SamplingParams, *, group_size: int
) -> Iterator[Drawn]:
    """`group_size` rollouts for each example.

    Args:
      run: its sampler, and its episode runner if it has one.
      examples: by the number of their group.
      params: how answers are drawn.
      group_size: rollouts for each.
    """
    if run.episode_runner is None:
        numbers, prompts = list(examples), [example.tokens for example in examples.values()]
        for completion in run.sampler.sample(prompts, params, group_size=group_size):
            group = numbers[completion.prompt_index]
            rollout = as_rollout(run, completion, examples[group], group=group)
            yield Drawn(completion.sample_index, rollout)
        return
    played = run.episode_runner.run(
        examples, sampler=run.sampler, params=params, group_size=group_size
    )
    if played.first_failure is not None:
        run.tracker.note(f"an environment failed: {played.first_failure}")
    for i, rollout in enumerate(played.rollouts):
        if rollout.truncated and run.config.train.mask_truncated:
            nothing = np.zeros(len(rollout.completion), bool)
            rollout = rollout._replace(action_mask=nothing)
        yield Drawn(i % group_size, rollout)


def as_rollout(run: Run, completion: Completion, example: Example, *, group: int) -> Rollout:
    """An answer to a prompt, without its reward."""
    truncated = completion.finish_reason == "length"
    learnt = not (truncated and run.config.train.mask_truncated)
    return Rollout(
        prompt=example.tokens,
        completion=completion.tokens,
        logprobs=completion.logprobs,
        action_mask=np.full(len(completion.tokens), learnt),
        version=completion.versions,
        group=group,
        truncated=truncated,
        experts=completion.experts,
    )
