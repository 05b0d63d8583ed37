"""Held-out evaluation: greedy answers, and the share of them that the reward calls right."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.data import Example, Tokenizer
from jaxrl.environments import scoring
from jaxrl.environments.scoring import Reward
from jaxrl.sampling.base import Sampler, SamplingParams


class Evaluation(NamedTuple):
    """Greedy answers to N prompts, in their order.

    Attributes:
      accuracy: mean of the first reward over the answers that it could score.
      completions: the answers' texts.
      rewards: f64[N], the first reward of each; NaN where it failed.
    """

    accuracy: float
    completions: list[str]
    rewards: np.ndarray


def evaluate_greedily(
    sampler: Sampler,
    examples: Sequence[Example],
    *,
    sampling: SamplingParams,
    reward: Reward,
    tokenizer: Tokenizer,
) -> Evaluation:
    """Answers every prompt greedily and scores the answers.

    Args:
      sampler: serves the policy.
      examples: the held-out prompts.
      sampling: length and stop sequences; its temperature and truncation are not used.
      reward: what counts as right, usually 0 or 1; its weight is not applied.
      tokenizer: the model's.

    Raises:
      RuntimeError: if the reward fails on every answer.
    """
    greedy = dataclasses.replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    texts = [""] * len(examples)
    for answer in sampler.sample([e.tokens for e in examples], greedy, group_size=1):
        texts[answer.prompt_index] = tokenizer.decode(answer.tokens, skip_special_tokens=True)
    scored = scoring.score([reward], texts, [e.record for e in examples])
    rewards = scored.parts[reward.name]
    if np.isnan(rewards).all():
        raise RuntimeError(f"no held-out answer could be scored; {scored.first_failure}")
    return Evaluation(float(np.nanmean(rewards)), texts, rewards)
