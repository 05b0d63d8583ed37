"""Held-out evaluation: greedy completions and their mean reward."""

from typing import NamedTuple

import numpy as np

from jaxrl.core.batch import Rollout
from jaxrl.environments.episodes.episode import environment_reward, episode_metrics, last_turn
from jaxrl.environments.rewards import scoring
from jaxrl.training.rollouts.generate import RolloutSource


class Evaluation(NamedTuple):
    """Greedy completions of N prompts, in their order.

    Attributes:
      accuracy: mean of the first reward over the completions that it could score.
      completions: their texts.
      rewards: f64[N], the first reward of each; NaN where it or the environment failed.
      numbers: metrics of the episodes; empty without an environment.
      episodes: the episodes with all of their tokens; empty without an environment.
    """

    accuracy: float
    completions: list[str]
    rewards: np.ndarray
    numbers: dict[str, float]
    episodes: list[Rollout]


def evaluate_greedily(source: RolloutSource) -> Evaluation:
    """Completes every held-out prompt greedily and scores the completions by the first reward
    function, usually 0 or 1, whose weight is not applied. Without functions, the environment
    rewards them.

    Raises:
      RuntimeError: if the reward or the environment fails on every completion.
    """
    task, sampler, params = source.task, source.sampler, source.greedy
    examples = task.held_out.examples if task.held_out is not None else ()
    episodes: list[Rollout] = []
    failure = None
    if source.episode_runner is None:
        completions = [np.zeros(0, np.int32)] * len(examples)
        for one in sampler.sample([e.tokens for e in examples], params, group_size=1):
            completions[one.prompt_index] = one.tokens
    else:
        numbered = dict(enumerate(examples))
        episodes, failure = source.episode_runner.run(
            numbered, sampler=sampler, params=params, group_size=1
        )
        completions = [last_turn(episode) for episode in episodes]
    decode = task.tokenizer.decode
    texts = [decode(tokens, skip_special_tokens=True) for tokens in completions]
    if not task.rewards:
        rewards = np.array([environment_reward(episode) for episode in episodes])
    else:
        reward = task.rewards[0]
        scored = scoring.score([reward], texts, [e.record for e in examples])
        rewards, failure = scored.components[reward.name], failure or scored.first_failure
    broken = [e.episode is not None and e.episode.failed for e in episodes]
    rewards = np.where(broken, np.nan, rewards) if broken else rewards
    if np.isnan(rewards).all():
        raise RuntimeError(f"every held-out completion failed to be scored; {failure}")
    return Evaluation(
        float(np.nanmean(rewards)), texts, rewards, episode_metrics(episodes), episodes
    )
