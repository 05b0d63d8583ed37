"""Advantages that need more than rewards and groups: lengths, components, a greedy completion."""

import numpy as np

from jaxrl.advantages.gae import gae
from jaxrl.advantages.groups import group_relative
from jaxrl.advantages.outcomes import Outcomes, by_component, within_group


@within_group
def opo(outcomes: Outcomes) -> np.ndarray:
    """Reward - mean of the group weighted by length, the baseline of least variance if tokens
    contribute alike; f32[N].

    OPO, arXiv:2505.23585.

    Example:
      >>> masks = [np.ones(n, bool) for n in (1, 3)]
      >>> opo(Outcomes(rewards=np.array([1.0, 0.0]), groups=np.array([7, 7]), action_masks=masks))
      array([ 0.75, -0.25], dtype=float32)
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
    the batch; f32[N]. A component of large values does not drown the others.

    GDPO, arXiv:2601.05242.

    Example:
      >>> parts = {"right": np.array([1.0, 0.0]), "short": np.array([0.0, 100.0])}
      >>> outcomes = Outcomes(
      ...     rewards=parts["right"] + parts["short"],
      ...     groups=np.array([7, 7]),
      ...     action_masks=[np.ones(1, bool)] * 2,
      ...     components=parts,
      ...     weights={"right": 2.0, "short": 1.0},
      ... )
      >>> gdpo(outcomes).round(3)
      array([ 0.707, -0.707], dtype=float32)

    Raises:
      ValueError: if the outcomes hold no components, or a penalty for distance from the reference,
        which is not a component.
    """
    if outcomes.penalties is not None:
        raise ValueError(
            "gdpo reads the components of the reward; the penalty for distance from the reference "
            "(reward.kl) is not a component and would change nothing; use loss.kl"
        )
    if not outcomes.components:
        raise ValueError("gdpo reads the components of the reward: outcomes.components is empty")
    known = ~np.isnan(outcomes.rewards)
    total = np.zeros(len(known))
    for name, values in outcomes.components.items():
        own = group_relative(np.where(known, values, np.nan), outcomes.groups, eps=eps)
        total += outcomes.weights[name] * own
    advantages = np.zeros(len(known), np.float32)
    advantages[known] = _relative(total[known], np.ones(known.sum()), eps=eps)
    return advantages


def remax(outcomes: Outcomes) -> np.ndarray:
    """Reward - reward of the greedy completion of the same prompt; f32[N].

    ReMax, arXiv:2310.10505.

    Example:
      >>> rewards, masks = np.array([1.0, 0.0]), [np.ones(1, bool)] * 2
      >>> groups, greedy = np.array([7, 8]), lambda: np.array([1.0, 1.0])
      >>> remax(Outcomes(rewards=rewards, groups=groups, action_masks=masks, greedy=greedy))
      array([ 0., -1.], dtype=float32)
    """
    return np.nan_to_num(outcomes.rewards - outcomes.greedy()).astype(np.float32)


def reinforce_pp(outcomes: Outcomes, *, gamma: float = 1.0, eps: float = 1e-8) -> list[np.ndarray]:
    """The discounted sum of rewards and penalties that follow a token, relative to all tokens of
    the batch; for each completion f32[C].

    REINFORCE++, arXiv:2501.03262.

    Example:
      >>> masks = [np.ones(2, bool)] * 2
      >>> outcomes = Outcomes(
      ...     rewards=np.array([1.0, 0.0]), groups=np.array([7, 8]), action_masks=masks
      ... )
      >>> np.stack(reinforce_pp(outcomes, gamma=0.5)).round(2)
      array([[ 0.26,  1.31],
             [-0.78, -0.78]], dtype=float32)
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

    Example:
      >>> rewards, masks = np.array([1.0, 0.0, 5.0, 3.0]), [np.ones(1, bool)] * 4
      >>> groups = np.array([7, 7, 8, 8])
      >>> outcomes = Outcomes(rewards=rewards, groups=groups, action_masks=masks)
      >>> reinforce_pp_baseline(outcomes).round(2)
      array([ 0.55, -0.55,  1.1 , -1.1 ], dtype=float32)
    """
    known = ~np.isnan(outcomes.rewards)
    _, index = np.unique(outcomes.groups, return_inverse=True)
    count = np.bincount(index, known)
    mean = np.bincount(index, np.nan_to_num(outcomes.rewards)) / np.maximum(count, 1)
    centred = np.nan_to_num(outcomes.rewards - np.where(count > 1, mean, 0.0)[index])
    relative = _relative(centred, (outcomes.lengths * known).astype(float), eps=eps)
    return np.where(known, relative, 0).astype(np.float32)


def _relative(values: np.ndarray, weights: np.ndarray, *, eps: float) -> np.ndarray:
    """Computes (values - mean) / (std + eps), counting each value `weights` times; std unbiased."""
    count = max(weights.sum(), 1.0)
    centred = values - (weights * values).sum() / count
    return centred / (np.sqrt((weights * centred**2).sum() / max(count - 1, 1.0)) + eps)
