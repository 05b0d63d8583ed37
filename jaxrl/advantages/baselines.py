"""Advantages that need more than rewards and groups: lengths, components, turns, a greedy
completion."""

import numpy as np

from jaxrl.advantages.critic import gae
from jaxrl.advantages.groups import group_mean, group_relative, grouped
from jaxrl.advantages.outcomes import Outcomes, by_component, within_group


@within_group
def opo(outcomes: Outcomes) -> np.ndarray:
    """Reward - mean of the group weighted by length, the baseline of least variance if all tokens
    contribute equally; f32[N].

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
    """Each component of the reward relative to its group, their weighted sum, and the sum relative
    to the batch; f32[N]. A component of large values does not drown the others.

    GDPO, arXiv:2601.05242.

    Example:
      >>> parts = {"right": np.array([1.0, 0.0]), "short": np.array([0.0, 100.0])}
      >>> weights, groups = {"right": 2.0, "short": 1.0}, np.array([7, 7])
      >>> given = {"rewards": sum(parts.values()), "action_masks": [np.ones(1, bool)] * 2}
      >>> gdpo(Outcomes(groups=groups, components=parts, weights=weights, **given)).round(3)
      array([ 0.707, -0.707], dtype=float32)

    Raises:
      ValueError: if the outcomes hold no components, or a penalty, which is not a component.
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


@within_group
def optimal_token_baseline(outcomes: Outcomes) -> list[np.ndarray]:
    """The rewards that follow a token, minus their mean over the group at the same token, weighted
    by the energy W up to it; alone in its group: the rewards. For each completion f32[C].

    W is the sum over a completion's tokens so far of |d log p / d logits|^2 = 1 - 2 p + sum of p^2
    over the vocabulary, a proxy of the squared gradient, which needs a forward pass. The baseline
    minimises the variance of the gradient (arXiv:2602.07078). Where a single completion of the
    group is left the advantage is 0, as in veRL. Tokens that the policy did not choose are skipped.

    Example:
      >>> given = {"groups": np.array([7, 7]), "action_masks": [np.ones(2, bool)] * 2}
      >>> energies = [np.array([0.5, 0.5]), np.array([1.5, 0.5])]
      >>> outcomes = Outcomes(rewards=np.array([1.0, 0.0]), energies=lambda: energies, **given)
      >>> np.stack(optimal_token_baseline(outcomes)).round(3)  # baselines 0.5 / 2 and 1 / 3
      array([[ 0.75 ,  0.667],
             [-0.25 , -0.333]], dtype=float32)
    """
    masks, energies = outcomes.counted, outcomes.energies()
    longest = max((int(mask.sum()) for mask in masks), default=0)
    follow, energy = np.zeros((2, len(masks), longest))
    for i, (mask, rewards) in enumerate(zip(masks, outcomes.token_rewards(), strict=True)):
        count = int(mask.sum())
        follow[i, :count] = np.cumsum(rewards[mask][::-1])[::-1]
        energy[i, :count] = np.cumsum(np.asarray(energies[i], float)[mask])
    _, index = np.unique(outcomes.groups, return_inverse=True)
    weighted, total = np.zeros((2, index.max(initial=-1) + 1, longest))
    np.add.at(weighted, index, energy * follow)
    np.add.at(total, index, energy)
    several = np.bincount(index, [float(mask.any()) for mask in masks]) > 1
    baseline = np.where(several[:, None] & (total > 0), weighted, 0) / np.where(total > 0, total, 1)
    advantages = [np.zeros(len(mask), np.float32) for mask in masks]
    for found, mask, row in zip(advantages, masks, follow - baseline[index], strict=True):
        found[mask] = row[: int(mask.sum())]
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
      >>> rewards, masks = np.array([1.0, 0.0]), [np.ones(2, bool)] * 2
      >>> outcomes = Outcomes(rewards=rewards, groups=np.array([7, 8]), action_masks=masks)
      >>> np.stack(reinforce_pp(outcomes, gamma=0.5)).round(2)
      array([[ 0.26,  1.31],
             [-0.78, -0.78]], dtype=float32)
    """
    returns = [
        gae(rewards, np.zeros(len(rewards)), mask, gamma=gamma, lam=1.0)[0]
        for rewards, mask in zip(outcomes.token_rewards(), outcomes.action_masks, strict=True)
    ]
    if not returns:
        return []
    every, mask = np.concatenate(returns), np.concatenate(outcomes.counted)
    every = np.where(mask, _relative(every, mask.astype(float), eps=eps), 0).astype(np.float32)
    return np.split(every, np.cumsum([len(r) for r in returns])[:-1])


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
    rewards, index, count = grouped(outcomes.rewards, outcomes.groups)
    mean = np.where(count[index] > 1, group_mean(rewards, index, count), 0.0)
    weights = np.array([float(mask.sum()) for mask in outcomes.counted])
    relative = _relative(np.nan_to_num(rewards - mean), weights, eps=eps)
    return np.where(np.isnan(rewards), 0, relative).astype(np.float32)


@within_group
def turn_relative(outcomes: Outcomes) -> list[np.ndarray]:
    """Reward of an episode from a turn on, minus its mean over the group's episodes that reach the
    turn; one number for all tokens of the turn; for each completion f32[C].

    A turn gets no credit for rewards before it. In an episode of several sequences, whose order in
    time is not kept, all turns get credit for those of turns that another sequence trains. After
    the turn-level advantages of arXiv:2505.11821. Completions of a single turn get the advantages
    of `centred`. A reward that is NaN is left out of every mean, and its advantage is 0.

    Example:
      >>> given = {"groups": np.array([7, 7]), "action_masks": [np.ones(2, bool)] * 2}
      >>> turns = [[(0, 1, 1.0), (1, 2, 0.0)], [(0, 1, 0.0), (1, 2, 3.0)]]
      >>> outcomes = Outcomes(rewards=np.array([1.0, 3.0]), turns=turns, **given)
      >>> [found.tolist() for found in turn_relative(outcomes)]
      [[-1.0, -1.5], [1.0, 1.5]]
    """
    masks = outcomes.counted
    turns = outcomes.turns or [((0, len(mask), 0.0),) for mask in masks]
    _, groups = np.unique(outcomes.groups, return_inverse=True)
    later: dict[tuple[int, int], dict[int, float]] = {}  # (group, turn) -> by completion
    for i, rewards in enumerate(outcomes.token_rewards()):
        if masks[i].any():
            for k, (start, _, _) in enumerate(turns[i]):
                later.setdefault((int(groups[i]), k), {})[i] = float(rewards[start:].sum())
    advantages = [np.zeros(len(mask), np.float32) for mask in masks]
    for (_, k), returns in later.items():
        mean = sum(returns.values()) / len(returns)
        for i, value in returns.items():
            start, end, _ = turns[i][k]
            advantages[i][start:end] = np.where(masks[i][start:end], value - mean, 0.0)
    return advantages


def _relative(values: np.ndarray, weights: np.ndarray, *, eps: float) -> np.ndarray:
    """Computes (values - mean) / (std + eps), counting each value `weights` times; std unbiased."""
    count = max(weights.sum(), 1.0)
    centred = values - (weights * values).sum() / count
    return centred / (np.sqrt((weights * centred**2).sum() / max(count - 1, 1.0)) + eps)
