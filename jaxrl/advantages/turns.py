"""Advantages of the turns of an episode (host, numpy)."""

import numpy as np

from jaxrl.advantages.outcomes import Outcomes, within_group


@within_group
def turn_relative(outcomes: Outcomes) -> list[np.ndarray]:
    """What an episode earned from a turn on, minus the mean of that over the episodes of its group
    that have as many turns: at each token of the turn; for each answer f32[C].

    A turn is not praised for what was earned before it. After the turn-level advantages of
    arXiv:2505.11821. Answers of a single turn get what `centred` gives them. A reward that is NaN
    is left out of every mean, and its advantage is 0.
    """
    masks = [np.asarray(mask, bool) for mask in outcomes.action_masks]
    turns = outcomes.turns or [((0, len(mask), 0.0),) for mask in masks]
    _, groups = np.unique(outcomes.groups, return_inverse=True)
    later: dict[tuple[int, int], dict[int, float]] = {}  # (group, turn) -> by answer
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
