"""Advantages of the turns of an episode (host, numpy)."""

import numpy as np

from jaxrl.advantages.outcomes import Outcomes, within_group


@within_group
def turn_relative(outcomes: Outcomes) -> list[np.ndarray]:
    """Reward of an episode from a turn on, minus its mean over the episodes of the group that reach
    the turn: at each token of the turn; for each completion f32[C].

    A turn gets no credit for rewards before it. After the turn-level advantages of
    arXiv:2505.11821. Completions of a single turn get the advantages of `centred`. A reward that is
    NaN is left out of every mean, and its advantage is 0.

    Example:
      >>> outcomes = Outcomes(
      ...     rewards=np.array([1.0, 3.0]),
      ...     groups=np.array([7, 7]),
      ...     action_masks=[np.ones(2, bool)] * 2,
      ...     turns=[[(0, 1, 1.0), (1, 2, 0.0)], [(0, 1, 0.0), (1, 2, 3.0)]],
      ... )
      >>> [found.tolist() for found in turn_relative(outcomes)]
      [[-1.0, -1.5], [1.0, 1.5]]
    """
    masks = [np.asarray(mask, bool) for mask in outcomes.action_masks]
    turns = outcomes.turns or [((0, len(mask), 0.0),) for mask in masks]
    _, groups = np.unique(outcomes.groups, return_inverse=True)
    later: dict[tuple[int, int], dict[int, float]] = {}  # (group, turn) -> by completion
    for i, rewards in enumerate(outcomes.token_rewards()):
        if masks[i].any() and not np.isnan(outcomes.rewards[i]):
            for k, (start, _, _) in enumerate(turns[i]):
                later.setdefault((int(groups[i]), k), {})[i] = float(rewards[start:].sum())
    advantages = [np.zeros(len(mask), np.float32) for mask in masks]
    for (_, k), returns in later.items():
        mean = sum(returns.values()) / len(returns)
        for i, value in returns.items():
            start, end, _ = turns[i][k]
            advantages[i][start:end] = np.where(masks[i][start:end], value - mean, 0.0)
    return advantages
