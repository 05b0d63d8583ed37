"""Advantages of single tokens from a critic's values (host, numpy)."""

import numpy as np


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    action_mask: np.ndarray,
    *,
    gamma: float,
    lam: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Generalized advantage estimation (arXiv:1506.02438) over one completion.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, where t + 1 is the
    next token that the policy chose; after the last one V and A are 0. Tokens that the policy did
    not choose are skipped: their rewards and values are not read, they discount nothing, and the
    result there is 0.

    Example:
      >>> rewards, values, chosen = np.array([0, 9, 1]), np.array([0.5, 9, 0.75]), [1, 0, 1]
      >>> gae(rewards, values, chosen, gamma=1.0, lam=0.5)  # the tool's token is skipped
      (array([0.375, 0.   , 0.25 ], dtype=float32), array([0.875, 0.   , 1.   ], dtype=float32))

    Args:
      rewards: f[T], received for each token.
      values: f[T], the critic's expectation before each token.
      action_mask: bool[T], True where the policy chose the token.
      gamma: discount from one chosen token to the next.
      lam: 0 trusts the critic, 1 the rewards.

    Returns:
      (advantages, returns), both f32[T]; the returns, advantages + values, are the critic's target.

    Raises:
      ValueError: if the three arrays do not have one shape [T].
    """
    rewards, values = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    chosen = np.asarray(action_mask, bool)
    if rewards.ndim != 1 or not rewards.shape == values.shape == chosen.shape:
        raise ValueError(
            f"gae: rewards {rewards.shape}, values {values.shape} and action_mask {chosen.shape} "
            "must all have shape [T]"
        )
    expected = values[chosen]
    surprises = rewards[chosen] + gamma * np.append(expected[1:], 0.0)[: len(expected)] - expected
    found, following = np.zeros(len(surprises)), 0.0
    for t in reversed(range(len(surprises))):
        following = surprises[t] + gamma * lam * following
        found[t] = following
    advantages, returns = np.zeros(len(chosen), np.float32), np.zeros(len(chosen), np.float32)
    advantages[chosen], returns[chosen] = found, found + expected
    return advantages, returns
