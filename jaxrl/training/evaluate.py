"""Held-out evaluation: completions and their mean reward."""

from typing import NamedTuple

import numpy as np

from jaxrl.core import Rollout
from jaxrl.environments import environment_reward, episode_metrics, last_turn, score
from jaxrl.sampling import SamplingParams
from jaxrl.training.rollouts.generate import RolloutSource, generate


class Evaluation(NamedTuple):
    """S completions of each of N prompts, by prompt."""

    accuracy: float  # mean of the first reward over the completions that it could score
    completions: list[str]  # the N * S texts
    # f64[N, S], the first reward of each; NaN where it or the environment failed.
    rewards: np.ndarray
    numbers: dict[str, float]  # metrics of the episodes; empty without an environment
    # The N * S episodes with all of their tokens; empty without an environment.
    episodes: list[Rollout]


def evaluate_greedily(source: RolloutSource) -> Evaluation:
    """Completes every held-out prompt once, without randomness; raises as `evaluate`."""
    return evaluate(source, source.greedy, samples=1)


def evaluate(source: RolloutSource, params: SamplingParams, *, samples: int) -> Evaluation:
    """Completes every held-out prompt `samples` times and scores the completions by the first
    reward function, usually 0 or 1, whose weight is not applied. Without functions, the environment
    rewards them.

    Raises:
      RuntimeError: if the reward or the environment fails on every completion.
    """
    task, failures = source.task, list[str | None]()
    examples = task.held_out.examples if task.held_out is not None else ()
    noting = source._replace(note=failures.append)
    found = generate(noting, dict(enumerate(examples)), params=params, group_size=samples)
    ordered = sorted(found, key=lambda one: (one.rollout.group, one.index))
    rollouts = [one.rollout for one in ordered]
    texts = [task.tokenizer.decode(last_turn(r), skip_special_tokens=True) for r in rollouts]
    if not task.rewards:
        rewards = np.array([environment_reward(r) for r in rollouts])
    else:
        reward, records = task.rewards[0], [examples[r.group].record for r in rollouts]
        scored = score([reward], texts, records)
        rewards = scored.components[reward.name]
        failures.append(scored.first_failure)
    episodes = [r for r in rollouts if r.episode is not None]
    broken = [r.episode is not None and r.episode.failed for r in rollouts]
    rewards = np.where(broken, np.nan, rewards)
    if np.isnan(rewards).all():
        failure = next(filter(None, failures), None)
        raise RuntimeError(f"every held-out completion failed to be scored; {failure}")
    accuracy, rewards = float(np.nanmean(rewards)), rewards.reshape(len(examples), samples)
    return Evaluation(accuracy, texts, rewards, episode_metrics(episodes), episodes)
