"""Batches of rollouts: prompts -> sample -> reward, repeated by dynamic sampling."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from jaxrl.core import Rollout, by_group, chains
from jaxrl.data import Example, Tokenizer, next_indices
from jaxrl.diagnostics import completion_metrics, format_marks
from jaxrl.sampling import SamplingParams
from jaxrl.training.progress import Progress
from jaxrl.training.rollouts import dynamic_sampling
from jaxrl.training.rollouts.buffer import check_versions, staleness
from jaxrl.training.rollouts.generate import Generated, RolloutSource, generate
from jaxrl.training.rollouts.score import (
    failure_note,
    reward_metrics,
    score_rollouts,
    scores_by_group,
    with_teacher,
)
from jaxrl.training.timing import Numbers, clock

_READ = 256  # completions of a step, at most, whose texts are searched for marks of format


class RolloutBatch(NamedTuple):
    """The rollouts of a step, with their rewards."""

    batch: list[Rollout]  # those to train on
    sampled: list[Rollout]  # all that were sampled for this step
    numbers: Numbers  # metrics of sampling and rewards


def collect(source: RolloutSource, *, progress: Progress, seconds: Numbers) -> RolloutBatch:
    """Samples and scores one batch of rollouts. With a `rollouts.replay_share`, some of its groups
    are the last batch's.

    With dynamic sampling it repeats, up to `dynamic_sampling_rounds` more times, until the batch is
    full of groups whose rewards differ.
    """
    config = source.config.train
    extra_rounds = config.dynamic_sampling_rounds
    fresh = config.train_batch - dynamic_sampling.count_groups(progress.replay)
    found, sampled, rounds = progress.pending, list[Rollout](), 0
    failures = list[str]()
    noting = source._replace(note=failures.append)
    rollouts: list[Rollout] = []
    while rounds <= extra_rounds and dynamic_sampling.count_groups(found) < fresh:
        first, progress.position = progress.position, progress.position + fresh
        examples = prompts_at(source, range(first, progress.position))
        params = request_params(source, step=progress.step, request=rounds)
        rollouts = _sample_and_score(
            noting, examples, params=params, step=progress.step, seconds=seconds
        )
        kept = dynamic_sampling.informative(rollouts) if extra_rounds else rollouts
        found, sampled, rounds = [*found, *kept], [*sampled, *rollouts], rounds + 1
    weights, first = source.task.weights, next(iter(failures), None)
    if (note := failure_note(sampled, weights=weights, first=first)) is not None:
        source.note(f"step {progress.step + 1}: {note}")
    numbers = reward_metrics(sampled, weights=weights)
    groups = dynamic_sampling.count_groups(found)
    # If all rewards are equal, the last round is trained on: a KL term still has a gradient.
    batch, rest = dynamic_sampling.split_groups(found or rollouts, groups=fresh)
    # Without groups to replay the first step takes more new ones than the next, which would have
    # nothing to sample if all surplus groups were kept.
    share = source.config.rollouts.replay_share
    again, kept = progress.replay, int(share * config.train_batch)
    most = config.train_batch - kept - 1
    progress.pending, dropped = dynamic_sampling.split_groups(rest, groups=most)
    if extra_rounds:
        numbers |= {
            "groups/rounds": float(rounds),
            "groups/trained": float(min(groups, fresh)),
            "groups/kept": float(dynamic_sampling.count_groups(progress.pending)),
            "groups/dropped": float(dynamic_sampling.count_groups(dropped)),
        }
    if groups < fresh:
        progress.short_batches += 1
        if progress.short_batches == 1:
            source.note(
                f"dynamic sampling found {groups} of {fresh} groups (train.train_batch, less those "
                f"that are replayed) in {rounds} rounds; training on these (groups/trained). The "
                "prompts are too easy or too hard, or train.dynamic_sampling_rounds is too small"
            )
    if share:
        progress.replay, _ = dynamic_sampling.split_groups(batch, groups=kept)
        batch = _interleaved(batch, again)
        ages = staleness(batch, step=progress.step)
        numbers |= {"staleness": float(np.mean(ages)), "staleness/max": float(max(ages))}
        numbers["rollouts/replayed"] = float(dynamic_sampling.count_groups(again))
    return RolloutBatch(batch, sampled, numbers)


def _interleaved(*parts: Sequence[Rollout]) -> list[Rollout]:
    """Merges the groups of several lists evenly, so that every mini-batch gets some of each."""
    placed: list[tuple[float, list[Rollout]]] = []
    for groups in (list(by_group(part).values()) for part in parts):
        placed += [((i + 0.5) / len(groups), group) for i, group in enumerate(groups)]
    return [r for _, group in sorted(placed, key=lambda one: one[0]) for r in group]


def step_metrics(rollouts: RolloutBatch, numbers: Numbers, *, tokenizer: Tokenizer) -> Numbers:
    """Returns all metrics of a step: `numbers`, and lengths, throughput, diversity and format."""
    read = range(0, len(rollouts.sampled), -(-len(rollouts.sampled) // _READ))
    chosen = [r.completion[r.action_mask] for r in map(rollouts.sampled.__getitem__, read)]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in chosen]
    lengths = np.array([len(r.completion) for r in rollouts.sampled])
    tokens = sum(one.length for r in rollouts.batch for one in chains(r))
    drawn = sum(len(one.completion) for r in rollouts.sampled for one in chains(r))
    derived = {
        "completion_length": float(lengths.mean()),
        "completion_length/max": float(lengths.max()),
        "completion/truncated": float(np.mean([r.truncated for r in rollouts.sampled])),
        "completion/marks": format_marks(texts) / max(1, sum(map(len, chosen))),
        "tokens_per_second": tokens / numbers["time/step"],
        "tokens_per_second/sample": drawn / max(numbers["time/sample"], 1e-9),
        "tokens_per_second/learn": tokens / numbers["time/learn"],
        # Without a reference model: the divergence from the sampled policy.
        "kl": numbers.get("kl/reference", numbers.get("mismatch/k3_kl", float("nan"))),
    }
    return completion_metrics(rollouts.sampled) | numbers | derived


def prompts_at(source: RolloutSource, numbers: Iterable[int]) -> dict[int, Example]:
    """Returns prompts by their number in the run."""
    examples, seed = source.task.prompts.examples, source.config.seed

    def index(number: int) -> int:
        return next_indices(len(examples), position=number, count=1, seed=seed)[0]

    return {number: examples[index(number)] for number in numbers}


def request_params(source: RolloutSource, *, step: int, request: int) -> SamplingParams:
    """Returns the sampling parameters of a request, with a seed for each (step, request)."""
    entropy = np.random.SeedSequence((source.config.seed, step, request))
    return dataclasses.replace(source.params, seed=int(entropy.generate_state(1)[0]))


def _sample_and_score(
    source: RolloutSource,
    examples: Mapping[int, Example],
    *,
    params: SamplingParams,
    step: int,
    seconds: Numbers,
) -> list[Rollout]:
    """Samples and scores the groups of some prompts; returns them in the prompts' order. Groups
    that are complete are scored in a thread while others are still being sampled."""
    size, early = source.config.train.group_size, scores_by_group(source)
    groups: dict[int, list[Generated]] = {number: [] for number in examples}
    ready, scored = SimpleQueue[list[Generated]](), list[Rollout]()

    def score_ready() -> None:
        # All that are ready at once, so that asynchronous rewards are computed together.
        found = [one for _ in range(ready.qsize()) for one in ready.get()]
        if found:
            rollouts = [rollout for _, rollout in found]
            scored.extend(score_rollouts(source, rollouts, examples=examples))

    with ThreadPoolExecutor(1, thread_name_prefix="rewards") as thread:
        with clock(seconds, "time/sample"):
            tasks = list[Future[None]]()
            for one in generate(source, examples, params=params, group_size=size, scored=early):
                check_versions([one.rollout], step=step, oldest=step)
                groups[one.rollout.group].append(one)
                if early and len(groups[one.rollout.group]) == size:
                    complete = _ordered(groups.pop(one.rollout.group))
                    if source.workers is not None:
                        scored.extend(rollout for _, rollout in complete)
                    else:
                        ready.put(complete)
                        tasks.append(thread.submit(score_ready))
        with clock(seconds, "time/reward"):
            for task in tasks:
                task.result()
            for group in groups.values():
                ready.put(_ordered(group))
            score_ready()
            scored = with_teacher(source, scored)
    order = {number: i for i, number in enumerate(examples)}
    # Training must not depend on the order in which they finished.
    return sorted(scored, key=lambda rollout: order[rollout.group])


def _ordered(group: list[Generated]) -> list[Generated]:
    return sorted(group, key=lambda one: one.index)


def greedy_rewards(source: RolloutSource, rollouts: Sequence[Rollout]) -> np.ndarray:
    """Computes the total reward of each prompt's greedy completion, f64[N]; NaN where it failed."""
    examples = prompts_at(source, sorted({r.group for r in rollouts}))
    generated = generate(source, examples, params=source.greedy, group_size=1)
    completed = [rollout for _, rollout in generated]
    by_group = {r.group: r.reward for r in score_rollouts(source, completed, examples=examples)}
    return np.array([by_group[r.group] for r in rollouts])
