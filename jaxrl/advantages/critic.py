"""Advantages from a critic's values, and the critic's targets (host, numpy)."""

from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.advantages.outcomes import Outcomes


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    action_mask: np.ndarray,
    *,
    gamma: float,
    lam: float,
    cut: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Generalized advantage estimation (arXiv:1506.02438) over one completion.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, where t + 1 is the
    next token that the policy chose. After the last one A is 0 and V is `cut`: 0 if the completion
    ended there, and the critic's expectation of the rest if it was truncated. Tokens that the
    policy did not choose are skipped: their rewards and values are not read, they discount nothing,
    and the result there is 0.

    Example:
      >>> rewards, values, chosen = np.array([0, 9, 1]), np.array([0.5, 9, 0.75]), [1, 0, 1]
      >>> gae(rewards, values, chosen, gamma=1.0, lam=0.5)  # the tool's token is skipped
      (array([0.375, 0.   , 0.25 ], dtype=float32), array([0.875, 0.   , 1.   ], dtype=float32))
      >>> gae(rewards, values, chosen, gamma=1.0, lam=0.5, cut=0.5)[0]  # more was to come
      array([0.625, 0.   , 0.75 ], dtype=float32)

    Args:
      rewards: f[T], received for each token.
      values: f[T], the critic's expectation before each token.
      action_mask: bool[T], True where the policy chose the token.
      gamma: discount from one chosen token to the next.
      lam: 0 trusts the critic, 1 the rewards.
      cut: the critic's expectation after the last token; 0 if nothing comes after it.

    Returns:
      (advantages, returns), both f32[T]; the critic's targets, returns, are advantages + values.

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
    surprises = rewards[chosen] + gamma * np.append(expected[1:], cut)[: len(expected)] - expected
    backwards, following, decay = list[float](), 0.0, gamma * lam
    for surprise in reversed(surprises.tolist()):  # numbers of numpy would take twice as long
        following = surprise + decay * following
        backwards.append(following)
    found = np.array(backwards[::-1])
    advantages, returns = np.zeros(len(chosen), np.float32), np.zeros(len(chosen), np.float32)
    advantages[chosen], returns[chosen] = found, found + expected
    return advantages, returns


def generalized(outcomes: Outcomes, *, gamma: float = 1.0, lam: float = 0.95) -> list[np.ndarray]:
    """Generalized advantages (`gae`) of every token, less their mean and divided by their standard
    deviation over all tokens of the batch that the policy chose; for each completion f32[C].

    PPO, arXiv:1707.06347.

    Example:
      >>> values = [np.array([0.5, 0.75]), np.array([0.5, 0.25])]
      >>> given = {"groups": np.array([7, 8]), "action_masks": [np.ones(2, bool)] * 2}
      >>> outcomes = Outcomes(rewards=np.array([1.0, 0.0]), values=values, **given)
      >>> np.stack(generalized(outcomes, lam=1.0)).round(2)
      array([[ 1.1 ,  0.55],
             [-1.1 , -0.55]], dtype=float32)

    Raises:
      ValueError: if the outcomes hold no values.
    """
    return _whitened(outcomes, gamma, lambda length: lam)


def length_adaptive(
    outcomes: Outcomes, *, gamma: float = 1.0, alpha: float = 0.05
) -> list[np.ndarray]:
    """`generalized` with lam = 1 - 1 / (alpha length), at least 0, of each completion: the weights
    of the surprises ahead of a token add up to alpha length. For each completion f32[C].

    VAPO, arXiv:2504.05118. Up to 1 / alpha tokens the paper's lam would be negative; as in NeMo-RL
    it is 0 there. Raises as `generalized`.

    Example:
      >>> values = [np.array([0.5, 0.75]), np.array([0.5, 0.25])]
      >>> given = {"groups": np.array([7, 8]), "action_masks": [np.ones(2, bool)] * 2}
      >>> outcomes = Outcomes(rewards=np.array([1.0, 0.0]), values=values, **given)
      >>> np.stack(length_adaptive(outcomes, alpha=1.0)).round(2)  # lam = 1 / 2
      array([[ 1.02,  0.68],
             [-1.02, -0.68]], dtype=float32)
    """
    return _whitened(outcomes, gamma, lambda length: 1 - 1 / max(alpha * length, 1.0))


def _whitened(outcomes: Outcomes, gamma: float, lam: Callable[[int], float]) -> list[np.ndarray]:
    """Computes `gae` less its mean and divided by its standard deviation over the batch."""
    found = [advantages for advantages, _ in _estimated(outcomes, gamma, lam)]
    known = _chosen(found, outcomes)
    mean, spread = (known.mean(), known.std(ddof=1)) if known.size > 1 else (0.0, 1.0)
    return [
        np.where(mask, (a - mean) / (spread + 1e-8), 0).astype(np.float32)
        for a, mask in zip(found, outcomes.counted, strict=True)
    ]


def lambda_returns(
    outcomes: Outcomes, *, gamma: float = 1.0, lam: float = 0.95
) -> list[np.ndarray]:
    """The critic's targets that go with `generalized`, f32[C] for each completion. Raises as
    `generalized`.

    Example:
      >>> given = {"rewards": np.array([1.0]), "groups": np.array([7])}
      >>> values, masks = [np.array([0.25, 0.5])], [np.ones(2, bool)]
      >>> outcomes = Outcomes(action_masks=masks, values=values, **given)
      >>> [lambda_returns(outcomes, lam=lam)[0].tolist() for lam in (0.0, 1.0)]
      [[0.5, 1.0], [1.0, 1.0]]
    """
    return [returns for _, returns in _estimated(outcomes, gamma, lambda length: lam)]


def explained_variance(returns: Sequence[np.ndarray], outcomes: Outcomes) -> float:
    """1 - var(returns - values) / var(returns) over the tokens that the policy chose: 1 for a
    perfect critic, 0 for one that predicts a constant; NaN where all returns are equal. `returns`
    are f[C] for each completion.

    Example:
      >>> given = {"rewards": np.array([1.0]), "groups": np.array([7])}
      >>> values, masks = [np.array([0.0, 0.5])], [np.ones(2, bool)]
      >>> outcomes = Outcomes(action_masks=masks, values=values, **given)
      >>> explained_variance([np.array([0.0, 1.0])], outcomes)
      0.75
    """
    wanted = _chosen(returns, outcomes)
    spread = wanted.var() if wanted.size else 0.0
    if not spread:
        return float("nan")
    return float(1 - (wanted - _chosen(_values(outcomes), outcomes)).var() / spread)


def _estimated(
    outcomes: Outcomes, gamma: float, lam: Callable[[int], float]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Applies `gae` to each completion; `lam` maps its number of action tokens."""
    cuts = np.zeros(len(outcomes.rewards)) if outcomes.cuts is None else outcomes.cuts
    given = zip(outcomes.token_rewards(), _values(outcomes), outcomes.counted, cuts, strict=True)
    return [
        gae(rewards, values, mask, gamma=gamma, lam=lam(int(mask.sum())), cut=float(cut))
        for rewards, values, mask, cut in given
    ]


def _values(outcomes: Outcomes) -> Sequence[np.ndarray]:
    if outcomes.values is None:
        raise ValueError(
            "the advantage estimator reads a critic's values, and outcomes.values is None; use the "
            "recipe ppo, which has a critic"
        )
    return outcomes.values


def _chosen(arrays: Sequence[np.ndarray], outcomes: Outcomes) -> np.ndarray:
    picked = [np.asarray(a, float)[m] for a, m in zip(arrays, outcomes.counted, strict=True)]
    return np.concatenate([*picked, np.zeros(0)])
