"""Held-out evaluation: greedy completions and their mean reward."""

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
from jaxrl.training.rollouts.generate import Generator
from jaxrl.training.rollouts.score import Scorer


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


def evaluate_greedily(
    sampler: Sampler,
    examples: Sequence[Example],
    *,
    sampling: SamplingParams,
    reward: Reward | None,
    tokenizer: Tokenizer,
    episode_runner: EpisodeRunner | None = None,
) -> Evaluation:
    """Completes every prompt greedily and scores the completions.

    Args:
      sampler: serves the policy.
      examples: the held-out prompts.
      sampling: length and stop sequences; its temperature and truncation are not used.
      reward: measures correctness, usually 0 or 1; its weight is not applied. None takes the
        rewards of the environment.
      tokenizer: the model's.
      episode_runner: runs the episodes, whose last turns are scored; None for completions of a
        single turn.

    Raises:
      RuntimeError: if the reward or the environment fails on every completion.
    """
    greedy = dataclasses.replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    if episode_runner is None:
        completions = [np.zeros(0, np.int32)] * len(examples)
        for one in sampler.sample([e.tokens for e in examples], greedy, group_size=1):
            completions[one.prompt_index] = one.tokens
        episodes: list[Rollout] = []
        failure = None
    else:
        numbered = dict(enumerate(examples))
        episodes, failure = episode_runner.run(
            numbered, sampler=sampler, params=greedy, group_size=1
        )
        completions = [last_turn(episode) for episode in episodes]
    texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in completions]
    if reward is None:
        rewards = np.array([environment_reward(episode) for episode in episodes])
    else:
        scored = scoring.score([reward], texts, [e.record for e in examples])
        rewards, failure = scored.components[reward.name], failure or scored.first_failure
    broken = [e.episode is not None and e.episode.failed for e in episodes]
    rewards = np.where(broken, np.nan, rewards) if broken else rewards
    if np.isnan(rewards).all():
        raise RuntimeError(f"every held-out completion failed to be scored; {failure}")
    return Evaluation(
        float(np.nanmean(rewards)), texts, rewards, episode_metrics(episodes), episodes
    )


def evaluate_held_out(
    examples: Sequence[Example], *, generator: Generator, scorer: Scorer
) -> Evaluation:
    """Evaluates the policy of a run on its held-out prompts, by the first reward function."""
    return evaluate_greedily(
        generator.sampler,
        examples,
        sampling=generator.params,
        reward=scorer.functions[0] if scorer.functions else None,
        tokenizer=scorer.tokenizer,
        episode_runner=generator.episode_runner,
    )
