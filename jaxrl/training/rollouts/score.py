"""Rewards of rollouts: reward functions, a reward model, the environment."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.advantages import zero_std_groups
from jaxrl.builders.reward_model import RewardModel
from jaxrl.core.batch import Rollout
from jaxrl.data.prompts import Example, Tokenizer
from jaxrl.environments.episodes.episode import environment_reward, episode_metrics, last_turn
from jaxrl.environments.rewards import scoring
from jaxrl.environments.rewards.scoring import Reward
from jaxrl.training.timing import Numbers

MODEL, ENVIRONMENT = "model", "environment"  # the parts of a reward that are not functions


class Scorer(NamedTuple):
    """Computes the rewards of rollouts.

    Attributes:
      functions: the reward functions.
      model: the reward model; None without one.
      weights: of the parts of the reward, by name: functions, then MODEL, then ENVIRONMENT.
      tokenizer: the policy's.
      note: shows a line to the user.
    """

    functions: Sequence[Reward]
    model: RewardModel | None
    weights: Mapping[str, float]
    tokenizer: Tokenizer
    note: Callable[[str], None]


def score_rollouts(
    scorer: Scorer, rollouts: Sequence[Rollout], *, examples: Mapping[int, Example]
) -> list[Rollout]:
    """Returns the rollouts with their rewards.

    A rollout whose reward failed is masked, so that nothing is learned from it. Reward functions
    read the last turn; they are not called for an episode whose environment failed.
    """
    known = [i for i, r in enumerate(rollouts) if r.episode is None or not r.episode.failed]
    decode = scorer.tokenizer.decode
    texts = [decode(last_turn(rollouts[i]), skip_special_tokens=True) for i in known]
    records = [examples[rollouts[i].group].record for i in known]
    scored, weights = scoring.score(scorer.functions, texts, records), scorer.weights
    if scorer.model is not None:
        values = scorer.model(rollouts)[known]
        scored = scoring.with_component(scored, MODEL, values=values, weight=weights[MODEL])
    if ENVIRONMENT in weights:
        values = np.array([environment_reward(rollouts[i]) for i in known])
        scored = scoring.with_component(
            scored, ENVIRONMENT, values=values, weight=weights[ENVIRONMENT]
        )
    if scored.first_failure is not None:
        scorer.note(scored.first_failure)
    total = np.full(len(rollouts), np.nan)
    components = np.full((len(rollouts), len(weights)), np.nan)
    total[known] = scored.total
    components[known] = np.stack(list(scored.components.values()), axis=1)
    failed = np.isnan(total)
    return [
        r._replace(
            reward=float(total[i]),
            components=tuple(map(float, components[i])),
            action_mask=r.action_mask & (not failed[i]),
        )
        for i, r in enumerate(rollouts)
    ]


def reward_metrics(rollouts: Sequence[Rollout], *, names: Sequence[str]) -> Numbers:
    """Computes means over the known rewards, and counts of the rest.

    Args:
      rollouts: with their rewards.
      names: of the parts of the reward.

    Raises:
      RuntimeError: if every reward failed.
    """
    rewards = np.array([r.reward for r in rollouts])
    if np.isnan(rewards).all():
        raise RuntimeError(
            f"the rewards of all {len(rollouts)} rollouts failed; the first failure is logged above"
        )
    numbers = {
        "reward": float(np.nanmean(rewards)),
        "reward/std": float(np.nanstd(rewards)),
        "reward/failed": float(np.isnan(rewards).sum()),
        "groups/zero_std": float(zero_std_groups(rewards, np.array([r.group for r in rollouts]))),
    }
    if len(names) > 1:
        components = np.nanmean([r.components for r in rollouts], axis=0)
        numbers |= {
            f"reward/{name}": float(value) for name, value in zip(names, components, strict=True)
        }
    return numbers | episode_metrics(rollouts)
