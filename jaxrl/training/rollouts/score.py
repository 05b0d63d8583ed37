"""Rewards of rollouts: reward functions, a reward model, the environment."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl.advantages import zero_std_groups
from jaxrl.bridge import ControlError
from jaxrl.builders.task import ENVIRONMENT, MODEL
from jaxrl.core import Rollout
from jaxrl.data import Example
from jaxrl.environments import environment_reward, episode_metrics, last_turn, score, with_component
from jaxrl.training.rollouts.generate import RolloutSource
from jaxrl.training.timing import Numbers


def scores_by_group(source: RolloutSource) -> bool:
    """Tells if groups can be scored while others are sampled: not if a reward function takes all
    completions at once, nor with a reward model, which needs the devices."""
    return source.reward_model is None and not any(r.takes_all for r in source.task.rewards)


def score_rollouts(
    source: RolloutSource, rollouts: Sequence[Rollout], *, examples: Mapping[int, Example]
) -> list[Rollout]:
    """Returns the rollouts with their rewards.

    A rollout whose reward failed is masked and not trained on, unless the weight of the part that
    failed is 0. Reward functions read the last turn; they are not called for an episode whose
    environment failed.
    """
    task, weights = source.task, source.task.weights
    known = [i for i, r in enumerate(rollouts) if r.episode is None or not r.episode.failed]
    decode = task.tokenizer.decode
    texts = [decode(last_turn(rollouts[i]), skip_special_tokens=True) for i in known]
    records = [examples[rollouts[i].group] for i in known]
    scored = score(task.rewards, texts, records)
    further: dict[str, np.ndarray] = {}
    if source.reward_model is not None:
        try:
            further[MODEL] = source.reward_model(rollouts)[known]
        except ControlError as error:  # of a server
            source.note(f"reward.model: {error}")
            further[MODEL] = np.full(len(known), np.nan)
    if ENVIRONMENT in weights:
        further[ENVIRONMENT] = np.array([environment_reward(rollouts[i]) for i in known])
    for name, values in further.items():
        scored = with_component(scored, name, values=values, weight=weights[name])
    if scored.first_failure is not None:
        source.note(scored.first_failure)
    total = np.full(len(rollouts), np.nan)
    components = np.full((len(rollouts), len(weights)), np.nan)
    total[known] = scored.total
    components[known] = np.array([*scored.components.values()]).reshape(len(weights), len(known)).T
    failed = np.isnan(total)
    return [
        r._replace(
            reward=float(total[i]),
            components=tuple(map(float, components[i])),
            action_mask=r.action_mask & (not failed[i]),
        )
        for i, r in enumerate(rollouts)
    ]


def with_teacher(source: RolloutSource, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Returns the rollouts with the log-probs of the teacher, if there is one."""
    if source.teacher is None:
        return list(rollouts)
    sequences = [one for rollout in rollouts for one in (rollout, *rollout.branches)]
    scores = iter(source.teacher(sequences))
    return [
        r._replace(
            teacher=next(scores),
            branches=tuple(branch._replace(teacher=next(scores)) for branch in r.branches),
        )
        for r in rollouts
    ]


def reward_metrics(rollouts: Sequence[Rollout], *, weights: Mapping[str, float]) -> Numbers:
    """Computes the means of the known rewards and of their parts, and counts failures.

    Raises:
      RuntimeError: if every reward failed.
    """
    rewards = np.array([r.reward for r in rollouts])
    if np.isnan(rewards).all():
        raise RuntimeError(
            f"the rewards of all {len(rollouts)} rollouts failed; the first failure is logged above"
        )
    groups = np.array([r.group for r in rollouts])
    numbers = {
        "reward": float(np.nanmean(rewards)),
        "reward/std": float(np.nanstd(rewards)),
        "reward/failed": float(np.isnan(rewards).sum()),
        "completions": float(len(rollouts)),
        "groups/zero_std": float(zero_std_groups(rewards, groups)),
    } | _outcomes(rewards, groups)
    if len(weights) > 1 or 0.0 in weights.values():
        components = np.array([r.components for r in rollouts])
        totals, known = np.nansum(components, axis=0), (~np.isnan(components)).sum(axis=0)
        for name, total, count in zip(weights, totals, known, strict=True):
            numbers[f"reward/{name}"] = float(total / count) if count else math.nan
        failed = _failed_parts(rollouts, weights)
        numbers |= {f"reward/{name}/failed": float(count) for name, count in failed.items()}
    return numbers | episode_metrics(rollouts)


def _outcomes(rewards: np.ndarray, groups: np.ndarray) -> Numbers:
    """Counts the groups that are right, wrong or mixed; nothing if a reward is neither 0 nor 1."""
    known = ~np.isnan(rewards)
    rewards, groups = rewards[known], groups[known]
    if not np.isin(rewards, (0.0, 1.0)).all():
        return {}
    means = [float(rewards[groups == group].mean()) for group in np.unique(groups)]
    right, wrong = float(means.count(1.0)), float(means.count(0.0))
    return {
        "groups/right": right,
        "groups/mixed": len(means) - right - wrong,
        "groups/wrong": wrong,
    }


def failure_note(
    rollouts: Sequence[Rollout], *, weights: Mapping[str, float], first: str | None
) -> str | None:
    """Counts the failures of each part of the reward in one line, and quotes the first; None if
    there are none."""
    counts = [
        f"reward {name}{' (weight 0)' * (weights[name] == 0)}: {failed} of {len(rollouts)} failed"
        for name, failed in _failed_parts(rollouts, weights).items()
        if failed
    ]
    return ", ".join([*counts, f"first: {first}"] if first else counts) if counts else None


def _failed_parts(rollouts: Sequence[Rollout], weights: Mapping[str, float]) -> dict[str, int]:
    """Counts for each part of the reward the rollouts on which it failed. An episode whose
    environment failed is a failure of the environment alone."""
    broken = np.array([r.episode is not None and r.episode.failed for r in rollouts])
    missing = np.isnan([r.components for r in rollouts]) & ~broken[:, None]
    failed = dict(zip(weights, missing.sum(axis=0).tolist(), strict=True))
    return failed | ({ENVIRONMENT: int(broken.sum())} if ENVIRONMENT in weights else {})
