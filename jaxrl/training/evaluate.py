"""Evaluation of a policy: completions of prompts and their rewards."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.builders.task import ENVIRONMENT
from jaxrl.core import Rollout
from jaxrl.data import Example
from jaxrl.environments import environment_reward, episode_metrics, last_turn, score, with_component
from jaxrl.sampling import SamplingParams
from jaxrl.training.rollouts.generate import RolloutSource, generate


class Evaluation(NamedTuple):
    """S completions of each of N prompts, by prompt."""

    # f64[N, S], the first reward of each; NaN where it or the environment failed.
    rewards: np.ndarray
    truncated: np.ndarray  # bool[N, S], completions that reached the limit of tokens
    completions: list[str]  # the N * S texts
    numbers: dict[str, float]  # metrics of the episodes; empty without an environment
    rollouts: list[Rollout]  # the N * S completions, or episodes, with their tokens
    first_failure: str | None  # of the environment or the reward; None if neither failed

    @property
    def accuracy(self) -> float:
        """The mean reward; a completion that could not be scored counts as wrong, as 0."""
        return float(np.nan_to_num(self.rewards).mean())

    @property
    def failed(self) -> int:
        """The number of completions that could not be scored."""
        return int(np.isnan(self.rewards).sum())

    @property
    def failure(self) -> str | None:
        """The count of failures and the first of them in one line; None if all were scored."""
        if not self.failed:
            return None
        counted = f"{self.failed} of {self.rewards.size} completions"
        return f"{counted} could not be scored and count as wrong, first: {self.first_failure}"

    @property
    def no_share(self) -> str | None:
        """A line if rewards outside of 0 to 1 keep the accuracy from being a share; else None."""
        beyond = self.rewards[(self.rewards < 0) | (self.rewards > 1)]
        if not beyond.size:
            return None
        return (
            f"{beyond.size} of {self.rewards.size} rewards are outside of 0 to 1, such as "
            f"{beyond[0]:.4g}, so the accuracy is a mean and not a share of right completions; "
            "name a reward of 0 or 1 first in reward.path"
        )

    def checked(self) -> "Evaluation":
        """Returns the same; raises RuntimeError if no completion could be scored."""
        if np.isnan(self.rewards).all():
            raise RuntimeError(f"every completion failed to be scored; {self.first_failure}")
        return self


def evaluate_greedily(source: RolloutSource) -> Evaluation:
    """Completes every held-out prompt once, without randomness.

    Raises:
      RuntimeError: if the reward or the environment fails on every completion, unless the reward
        has weight 0.
    """
    examples = source.task.held_out.examples if source.task.held_out is not None else ()
    found = evaluate(source, examples, params=source.greedy, samples=1)
    rewards = source.task.rewards
    return found if rewards and rewards[0].weight == 0 else found.checked()


def evaluate(
    source: RolloutSource, examples: Sequence[Example], *, params: SamplingParams, samples: int
) -> Evaluation:
    """Completes every prompt `samples` times and scores the completions with the first reward
    function, without its weight. Without functions, the environment rewards them."""
    task, failures = source.task, list[str | None]()
    noting = source._replace(note=failures.append)
    found = generate(noting, dict(enumerate(examples)), params=params, group_size=samples)
    ordered = sorted(found, key=lambda one: (one.rollout.group, one.index))
    rollouts = [one.rollout for one in ordered]
    texts = [task.tokenizer.decode(last_turn(r), skip_special_tokens=True) for r in rollouts]
    if not task.rewards:
        earned = np.array([environment_reward(r) for r in rollouts])
        scored, name = score([], texts, []), ENVIRONMENT
        scored = with_component(scored, name, values=earned, weight=1.0)
    else:
        name = task.rewards[0].name
        scored = score(task.rewards[:1], texts, [examples[r.group] for r in rollouts])
    failures.append(scored.first_failure)
    episodes = [r for r in rollouts if r.episode is not None]
    broken = [r.episode is not None and r.episode.failed for r in rollouts]
    shape = (len(examples), samples)
    return Evaluation(
        rewards=np.where(broken, np.nan, scored.components[name]).reshape(shape),
        truncated=np.array([r.truncated for r in rollouts]).reshape(shape),
        completions=texts,
        numbers=episode_metrics(episodes),
        rollouts=rollouts,
        first_failure=next(filter(None, failures), None),
    )
