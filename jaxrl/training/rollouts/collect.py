"""Batches of rollouts: prompts -> sample -> reward, with dynamic sampling around them."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.config.tables import TrainConfig
from jaxrl.core.batch import Rollout
from jaxrl.data import prompts
from jaxrl.data.prompts import Example
from jaxrl.training.progress import Progress
from jaxrl.training.rollouts import dynamic_sampling
from jaxrl.training.rollouts.generate import Generator, generate
from jaxrl.training.rollouts.score import Scorer, reward_metrics, score_rollouts
from jaxrl.training.timing import Numbers, clock


class RolloutSource(NamedTuple):
    """Samples and scores rollouts.

    Attributes:
      prompts: the training prompts.
      seed: of the run: of the order of the prompts, and of every sampling request.
      generator: prompts -> rollouts.
      scorer: rollouts -> their rewards.
    """

    prompts: Sequence[Example]
    seed: int
    generator: Generator
    scorer: Scorer


class RolloutBatch(NamedTuple):
    """The rollouts of a step, with their rewards.

    Attributes:
      batch: those to train on.
      sampled: all that were sampled for this step.
      numbers: metrics of sampling and rewards.
    """

    batch: list[Rollout]
    sampled: list[Rollout]
    numbers: Numbers


def collect(
    source: RolloutSource, config: TrainConfig, *, progress: Progress, seconds: Numbers
) -> RolloutBatch:
    """Samples and scores one batch of rollouts.

    With dynamic sampling it repeats, up to `dynamic_sampling_rounds` more times, until the batch is
    full of groups whose rewards differ.
    """
    extra_rounds = config.dynamic_sampling_rounds
    found, sampled, rounds = progress.pending, list[Rollout](), 0
    rollouts: list[Rollout] = []
    while rounds <= extra_rounds and dynamic_sampling.count_groups(found) < config.train_batch:
        with clock(seconds, "time/sample"):
            examples = next_prompts(source, progress, count=config.train_batch)
            rollouts = sample(
                source,
                examples,
                step=progress.step,
                request=rounds,
                group_size=config.group_size,
            )
        with clock(seconds, "time/reward"):
            rollouts = score_rollouts(source.scorer, rollouts, examples=examples)
        kept = dynamic_sampling.informative(rollouts) if extra_rounds else rollouts
        found, sampled, rounds = [*found, *kept], [*sampled, *rollouts], rounds + 1
    numbers = reward_metrics(sampled, names=list(source.scorer.weights))
    groups = dynamic_sampling.count_groups(found)
    # Where all rewards are equal, the last round is trained on: a KL term still has a gradient.
    batch, progress.pending = dynamic_sampling.split_groups(
        found or rollouts, groups=config.train_batch
    )
    if extra_rounds:
        numbers |= {
            "groups/rounds": float(rounds),
            "groups/trained": float(min(groups, config.train_batch)),
            "groups/kept": float(dynamic_sampling.count_groups(progress.pending)),
        }
    if groups < config.train_batch:
        progress.short_batches += 1
        if progress.short_batches == 1:
            source.generator.note(
                f"dynamic sampling found {groups} groups of train.train_batch = "
                f"{config.train_batch} in {rounds} rounds; training on these (groups/trained). The "
                "prompts are too easy or too hard, or train.dynamic_sampling_rounds is too small"
            )
    return RolloutBatch(batch, sampled, numbers)


def next_prompts(source: RolloutSource, progress: Progress, *, count: int) -> dict[int, Example]:
    """Takes the next prompts, by their number in the run; advances the position in the data."""
    first = progress.position
    progress.position += count
    return prompts_at(source, range(first, progress.position))


def prompts_at(source: RolloutSource, numbers: Iterable[int]) -> dict[int, Example]:
    """Returns prompts by their number in the run."""
    examples = source.prompts
    return {
        number: examples[
            prompts.next_indices(len(examples), position=number, count=1, seed=source.seed)[0]
        ]
        for number in numbers
    }


def sample(
    source: RolloutSource,
    examples: Mapping[int, Example],
    *,
    step: int,
    request: int,
    group_size: int,
) -> list[Rollout]:
    """Samples `group_size` rollouts for every prompt, without rewards, in the prompts' order.

    Args:
      source: samples the rollouts.
      examples: by their number in the run.
      step: version of the learner's policy.
      request: number of the request within the step; each has its own seed.
      group_size: rollouts for each prompt.

    Raises:
      RuntimeError: if the sampler serves a policy version newer than the learner's.
    """
    params = dataclasses.replace(
        source.generator.params, seed=request_seed(source.seed, step=step, request=request)
    )
    order = {number: i for i, number in enumerate(examples)}
    # They arrive as they finish; training must not depend on that.
    generated = sorted(
        generate(source.generator, examples, params=params, group_size=group_size),
        key=lambda one: (order[one.rollout.group], one.index),
    )
    for _, rollout in generated:
        if (newest := int(rollout.version.max(initial=0))) > step:
            raise RuntimeError(
                f"the sampler serves policy version {newest} and the learner is at {step}; "
                "another run publishes to the same servers"
            )
    return [rollout for _, rollout in generated]


def greedy_rewards(source: RolloutSource, rollouts: Sequence[Rollout]) -> np.ndarray:
    """Computes the whole reward of the greedy completion of each rollout's prompt, f64[N]; NaN
    where a reward failed."""
    examples = prompts_at(source, sorted({r.group for r in rollouts}))
    greedy = dataclasses.replace(
        source.generator.params, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0
    )
    generated = generate(source.generator, examples, params=greedy, group_size=1)
    completed = [rollout for _, rollout in generated]
    scored = score_rollouts(source.scorer, completed, examples=examples)
    by_group = {r.group: r.reward for r in scored}
    return np.array([by_group[r.group] for r in rollouts])


def request_seed(seed: int, *, step: int, request: int) -> int:
    """Derives the seed of a sampling request, the same when its step is repeated."""
    return int(np.random.SeedSequence((seed, step, request)).generate_state(1)[0])
