"""Advantages that need more than rewards and groups: lengths, components, a greedy answer."""

import numpy as np

from jaxrl.advantages.gae import gae
from jaxrl.advantages.groups import group_relative
from jaxrl.advantages.outcomes import Outcomes, by_component, within_group


@within_group
def opo(outcomes: Outcomes) -> np.ndarray:
    """Reward - mean of the group weighted by length, the baseline of least variance if tokens
    contribute alike; f32[N].

    OPO, arXiv:2505.23585.
    """
    rewards, lengths = outcomes.rewards, outcomes.lengths * ~np.isnan(outcomes.rewards)
    _, index = np.unique(outcomes.groups, return_inverse=True)
    total = np.bincount(index, lengths * np.nan_to_num(rewards))
    baseline = total / np.maximum(np.bincount(index, lengths), 1)
    return np.nan_to_num(rewards - baseline[index]).astype(np.float32)


@by_component
@within_group
def gdpo(outcomes: Outcomes, *, eps: float = 1e-6) -> np.ndarray:
    """Each component of the reward relative to its group, their weighted sum, and that relative to
    the batch; f32[N]. No component drowns another.

    GDPO, arXiv:2601.05242.

    Raises:
      ValueError: if the outcomes hold no components, or a penalty for distance from the reference,
        which is none of them.
    """
    if outcomes.penalties is not None:
        raise ValueError(
            "gdpo reads the components of the reward, and the penalty for distance from the "
            "reference (reward.kl) is none of them: it would change nothing; use loss.kl"
        )
    if not outcomes.components:
        raise ValueError("gdpo reads the components of the reward and there are none")
    known = ~np.isnan(outcomes.rewards)
    total = np.zeros(len(known))
    for name, values in outcomes.components.items():
        own = group_relative(np.where(known, values, np.nan), outcomes.groups, eps=eps)
        total += outcomes.weights[name] * own
    advantages = np.zeros(len(known), np.float32)
    advantages[known] = _relative(total[known], np.ones(known.sum()), eps=eps)
    return advantages


def remax(outcomes: Outcomes) -> np.ndarray:
    """Reward - reward of the greedy answer to the same prompt; f32[N].

    ReMax, arXiv:2310.10505.
    """
    return np.nan_to_num(outcomes.rewards - outcomes.greedy()).astype(np.float32)


def reinforce_pp(outcomes: Outcomes, *, gamma: float = 1.0, eps: float = 1e-8) -> list[np.ndarray]:
    """The discounted sum of rewards and penalties that follow a token, relative to all tokens of
    the batch; for each answer f32[C].

    REINFORCE++, arXiv:2501.03262.
    """
    returns = [
        gae(rewards, np.zeros(len(rewards)), mask, gamma=gamma, lam=1.0)[0]
        for rewards, mask in zip(outcomes.token_rewards(), outcomes.action_masks, strict=True)
    ]
    counted = [
        np.asarray(mask, bool) & (not unknown)
        for mask, unknown in zip(outcomes.action_masks, np.isnan(outcomes.rewards), strict=True)
    ]
    every, mask = np.concatenate([*returns, []]), np.concatenate([*counted, np.zeros(0, bool)])
    every = np.where(mask, _relative(every, mask.astype(float), eps=eps), 0).astype(np.float32)
    return np.split(every, np.cumsum([len(r) for r in returns])[:-1]) if returns else []


@within_group
def reinforce_pp_baseline(outcomes: Outcomes, *, eps: float = 1e-8) -> np.ndarray:
    """Reward - mean of the group (alone in its group: the reward), relative to all tokens of the
    batch; f32[N].

    REINFORCE++ with a baseline, arXiv:2501.03262.
    """
    known = ~np.isnan(outcomes.rewards)
    _, index = np.unique(outcomes.groups, return_inverse=True)
    count = np.bincount(index, known)
    mean = np.bincount(index, np.nan_to_num(outcomes.rewards)) / np.maximum(count, 1)
    centred = np.nan_to_num(outcomes.rewards - np.where(count > 1, mean, 0.0)[index])
    relative = _relative(centred, (outcomes.lengths * known).astype(float), eps=eps)
    return np.where(known, relative, 0).astype(np.float32)


def _relative(values: np.ndarray, weights: np.ndarray, *, eps: float) -> np.ndarray:
    """(values - mean) / (std + eps), where each value counts `weights` times; the std unbiased."""
    count = max(weights.sum(), 1.0)
    centred = values - (weights * values).sum() / count
    return centred / (np.sqrt((weights * centred**2).sum() / max(count - 1, 1.0)) + eps)
