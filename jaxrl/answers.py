"""Answers to learn from: prompts -> sample -> reward, and dynamic sampling around them."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from jaxrl import data, refill
from jaxrl.advantages import zero_std_groups
from jaxrl.batch import Rollout
from jaxrl.data import Example
from jaxrl.environments import scoring
from jaxrl.environments.reward_model import rate
from jaxrl.run import Progress, Run
from jaxrl.sampling.base import Completion

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
    while rounds <= c.refill_rounds and refill.count_groups(found) < c.train_batch:
        with clock(seconds, "time/sample"):
            examples = next_prompts(run, progress)
            rollouts = sample(run, examples, step=progress.step, round_=rounds)
        with clock(seconds, "time/reward"):
            rollouts = reward(run, rollouts, examples)
        found = [*found, *(refill.teaching(rollouts) if c.refill_rounds else rollouts)]
        sampled, rounds = [*sampled, *rollouts], rounds + 1
    numbers = reward_metrics(run, sampled)
    groups = refill.count_groups(found)
    # Where nothing teaches, groups that do not are learnt from: a KL term has its say in them, too.
    batch, progress.pending = refill.choose(found or rollouts, groups=c.train_batch)
    if c.refill_rounds:
        numbers |= {
            "groups/rounds": float(rounds),
            "groups/learnt": float(min(groups, c.train_batch)),
            "groups/kept": float(refill.count_groups(progress.pending)),
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
            data.take(len(examples), position=number, count=1, seed=run.config.seed)[0]
        ]
        for number in numbers
    }


def sample(
    run: Run, examples: Mapping[int, Example], *, step: int, round_: int = 0
) -> list[Rollout]:
    """`group_size` answers to every prompt, without rewards, in the order of the prompts."""
    c, prompts = run.config, list(examples.items())
    completions = run.sampler.sample(
        [example.tokens for _, example in prompts],
        dataclasses.replace(run.sampling, seed=seed(c.seed, step, round_)),
        group_size=c.train.group_size,
    )
    # They come as they finish; training must not depend on that.
    ordered = sorted(completions, key=lambda c: (c.prompt_index, c.sample_index))
    rollouts = []
    for completion in ordered:
        if (newest := int(completion.versions.max(initial=0))) > step:
            raise RuntimeError(
                f"the sampler answered with policy version {newest} and the learner is at {step}; "
                "the sampler serves another run"
            )
        number, example = prompts[completion.prompt_index]
        rollouts.append(as_rollout(run, completion, example, group=number))
    return rollouts


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
    )


def reward(run: Run, rollouts: Sequence[Rollout], examples: Mapping[int, Example]) -> list[Rollout]:
    """Rollouts with their rewards. One whose reward failed is masked: it teaches nothing."""
    texts = [run.tokenizer.decode(r.completion, skip_special_tokens=True) for r in rollouts]
    scored = scoring.score(run.rewards, texts, [examples[r.group].record for r in rollouts])
    if run.reward_model is not None:
        values, weight = rate(run.reward_model, rollouts), run.config.reward.model_weight
        scored = scoring.with_part(scored, "model", values=values, weight=weight)
    if scored.first_failure is not None:
        run.tracker.note(scored.first_failure)
    failed = np.isnan(scored.total)
    components = np.stack(list(scored.parts.values()), axis=1)
    return [
        r._replace(
            reward=float(scored.total[i]),
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
    if len(run.reward_names) > 1:
        components = np.nanmean([r.components for r in rollouts], axis=0)
        names = [f"reward/{name}" for name in run.reward_names]
        numbers |= dict(zip(names, map(float, components), strict=True))
    return numbers


@contextmanager
def clock(seconds: Numbers, name: str) -> Iterator[None]:
    """Adds the wall-clock seconds of the block to `seconds[name]`."""
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def seed(seed: int, step: int, request: int) -> int:
    """A seed of its own for every request of a step, the same when the step is done again."""
    return int(np.random.SeedSequence((seed, step, request)).generate_state(1)[0])
