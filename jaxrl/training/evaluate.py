"""Held-out evaluation: completions and their mean reward."""

from typing import NamedTuple

import numpy as np

from jaxrl.core.batch import Rollout
from jaxrl.environments.episodes.episode import environment_reward, episode_metrics, last_turn
from jaxrl.environments.rewards import scoring
from jaxrl.sampling.base import SamplingParams
from jaxrl.training.rollouts.generate import RolloutSource


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
    task, sampler = source.task, source.sampler
    examples = task.held_out.examples if task.held_out is not None else ()
    episodes: list[Rollout] = []
    failure = None
    if source.episode_runner is None:
        completions = [np.zeros(0, np.int32)] * (len(examples) * samples)
        for one in sampler.sample([e.tokens for e in examples], params, group_size=samples):
            completions[one.prompt_index * samples + one.sample_index] = one.tokens
    else:
        numbered = dict(enumerate(examples))
        episodes, failure = source.episode_runner.run(
            numbered, sampler=sampler, params=params, group_size=samples
        )
        completions = [last_turn(episode) for episode in episodes]
    decode = task.tokenizer.decode
    texts = [decode(tokens, skip_special_tokens=True) for tokens in completions]
    if not task.rewards:
        rewards = np.array([environment_reward(episode) for episode in episodes])
    else:
        reward, records = task.rewards[0], [e.record for e in examples for _ in range(samples)]
        scored = scoring.score([reward], texts, records)
        rewards, failure = scored.components[reward.name], failure or scored.first_failure
    broken = [e.episode is not None and e.episode.failed for e in episodes]
    rewards = np.where(broken, np.nan, rewards) if broken else rewards
    if np.isnan(rewards).all():
        raise RuntimeError(f"every held-out completion failed to be scored; {failure}")
    accuracy, rewards = float(np.nanmean(rewards)), rewards.reshape(len(examples), samples)
    return Evaluation(accuracy, texts, rewards, episode_metrics(episodes), episodes)
