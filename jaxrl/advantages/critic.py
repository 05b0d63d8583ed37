"""Advantages from a critic's values, and the critic's targets (host, numpy)."""

from collections.abc import Sequence

import numpy as np

from jaxrl.advantages.gae import gae
from jaxrl.advantages.outcomes import Outcomes

_EPS = 1e-8


def generalized(outcomes: Outcomes, *, gamma: float = 1.0, lam: float = 0.95) -> list[np.ndarray]:
    """Generalized advantages (`gae`) of every token, less their mean and divided by their standard
    deviation over all tokens of the batch that the policy chose; for each completion f32[C].

    PPO, arXiv:1707.06347.

    Example:
      >>> outcomes = Outcomes(
      ...     rewards=np.array([1.0, 0.0]),
      ...     groups=np.array([7, 8]),
      ...     action_masks=[np.ones(2, bool)] * 2,
      ...     values=[np.array([0.5, 0.75]), np.array([0.5, 0.25])],
      ... )
      >>> np.stack(generalized(outcomes, lam=1.0)).round(2)
      array([[ 1.1 ,  0.55],
             [-1.1 , -0.55]], dtype=float32)

    Raises:
      ValueError: if the outcomes hold no values.
    """
    found = [advantages for advantages, _ in _estimated(outcomes, gamma, lam)]
    known = _chosen(found, outcomes)
    mean, spread = (known.mean(), known.std(ddof=1)) if known.size > 1 else (0.0, 1.0)
    return [
        np.where(mask, (a - mean) / (spread + _EPS), 0).astype(np.float32)
        for a, mask in zip(found, _masks(outcomes), strict=True)
    ]


def lambda_returns(
    outcomes: Outcomes, *, gamma: float = 1.0, lam: float = 0.95
) -> list[np.ndarray]:
    """The targets of the critic that go with `generalized`, f32[C] for each completion.

    Example:
      >>> outcomes = Outcomes(
      ...     rewards=np.array([1.0]),
      ...     groups=np.array([7]),
      ...     action_masks=[np.ones(2, bool)],
      ...     values=[np.array([0.25, 0.5])],
      ... )
      >>> [lambda_returns(outcomes, lam=lam)[0].tolist() for lam in (0.0, 1.0)]
      [[0.5, 1.0], [1.0, 1.0]]

    Raises:
      ValueError: if the outcomes hold no values.
    """
    return [returns for _, returns in _estimated(outcomes, gamma, lam)]


def explained_variance(returns: Sequence[np.ndarray], outcomes: Outcomes) -> float:
    """1 - var(returns - values) / var(returns) over the tokens that the policy chose: 1 for a
    perfect critic, 0 for one that predicts a constant; NaN where all returns are equal. `returns`
    are f[C] for each completion.

    Example:
      >>> outcomes = Outcomes(
      ...     rewards=np.array([1.0]),
      ...     groups=np.array([7]),
      ...     action_masks=[np.ones(2, bool)],
      ...     values=[np.array([0.0, 0.5])],
      ... )
      >>> explained_variance([np.array([0.0, 1.0])], outcomes)
      0.75
    """
    wanted = _chosen(returns, outcomes)
    spread = wanted.var() if wanted.size else 0.0
    if not spread:
        return float("nan")
    return float(1 - (wanted - _chosen(_values(outcomes), outcomes)).var() / spread)


def _estimated(outcomes: Outcomes, gamma: float, lam: float) -> list[tuple[np.ndarray, np.ndarray]]:
    return [
        gae(rewards, values, mask, gamma=gamma, lam=lam)
        for rewards, values, mask in zip(
            outcomes.token_rewards(), _values(outcomes), _masks(outcomes), strict=True
        )
    ]


def _values(outcomes: Outcomes) -> Sequence[np.ndarray]:
    if outcomes.values is None:
        raise ValueError(
            "the advantage estimator reads a critic's values, and outcomes.values is None; use the "
            "recipe ppo, which has a critic"
        )
    return outcomes.values


def _masks(outcomes: Outcomes) -> list[np.ndarray]:
    """Marks the tokens that the policy chose, in completions whose reward is known."""
    return [
        np.asarray(mask, bool) & (not unknown)
        for mask, unknown in zip(outcomes.action_masks, np.isnan(outcomes.rewards), strict=True)
    ]


def _chosen(arrays: Sequence[np.ndarray], outcomes: Outcomes) -> np.ndarray:
    picked = [np.asarray(a, float)[m] for a, m in zip(arrays, _masks(outcomes), strict=True)]
    return np.concatenate([*picked, np.zeros(0)])
