"""Held-out evaluation: greedy answers, and the share of them that the reward calls right."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.core.batch import Rollout
from jaxrl.data.prompts import Example, Tokenizer
from jaxrl.environments.episodes.episode import environment_reward, episode_metrics, last_turn
from jaxrl.environments.episodes.runner import EpisodeRunner
from jaxrl.environments.rewards import scoring
from jaxrl.environments.rewards.scoring import Reward
from jaxrl.sampling.base import Sampler, SamplingParams


class Evaluation(NamedTuple):
    """Greedy answers to N prompts, in their order.

    Attributes:
      accuracy: mean of the first reward over the answers that it could score.
      completions: the answers' texts.
      rewards: f64[N], the first reward of each; NaN where it failed, or the environment.
      numbers: how the episodes went; nothing without an environment.
      episodes: likewise, all of their tokens.
    """

    accuracy: float
    completions: list[str]
    rewards: np.ndarray
    numbers: dict[str, float]
    episodes: list[Rollout]


def evaluate_greedily(
    sampler: Sampler,
    examples: Sequence[Example],
    *,
    sampling: SamplingParams,
    reward: Reward | None,
    tokenizer: Tokenizer,
    episode_runner: EpisodeRunner | None = None,
) -> Evaluation:
    """Answers every prompt greedily and scores the answers.

    Args:
      sampler: serves the policy.
      examples: the held-out prompts.
      sampling: length and stop sequences; its temperature and truncation are not used.
      reward: what counts as right, usually 0 or 1; its weight is not applied. None takes what the
        environment gives.
      tokenizer: the model's.
      episode_runner: runs the episodes whose last turns are scored; None if answers have a single
        turn.

    Raises:
      RuntimeError: if the reward, or the environment, fails on every answer.
    """
    greedy = dataclasses.replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    if episode_runner is None:
        answers = [np.zeros(0, np.int32)] * len(examples)
        for answer in sampler.sample([e.tokens for e in examples], greedy, group_size=1):
            answers[answer.prompt_index] = answer.tokens
        episodes: list[Rollout] = []
        failure = None
    else:
        numbered = dict(enumerate(examples))
        episodes, failure = episode_runner.run(
            numbered, sampler=sampler, params=greedy, group_size=1
        )
        answers = [last_turn(episode) for episode in episodes]
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answers]
    if reward is None:
        rewards = np.array([environment_reward(episode) for episode in episodes])
    else:
        scored = scoring.score([reward], texts, [e.record for e in examples])
        rewards, failure = scored.components[reward.name], failure or scored.first_failure
    broken = [e.episode is not None and e.episode.failed for e in episodes]
    rewards = np.where(broken, np.nan, rewards) if broken else rewards
    if np.isnan(rewards).all():
        raise RuntimeError(f"no held-out answer could be scored; {failure}")
    return Evaluation(
        float(np.nanmean(rewards)), texts, rewards, episode_metrics(episodes), episodes
    )
