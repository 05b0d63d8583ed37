"""Algorithms whose advantages come from a critic that is trained beside the policy."""

import functools

from jaxrl import advantages
from jaxrl.losses import bounds
from jaxrl.losses.aggregation import token_mean
from jaxrl.losses.algebra import objective
from jaxrl.losses.ratios import Ratio, over_sampler
from jaxrl.losses.recipe import Recipe
from jaxrl.losses.surrogates import clipped
from jaxrl.losses.value import Critic, value_loss


def ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    value_clip: float = 0.2,
    value_lam: float | None = None,
    ratio: Ratio = over_sampler,
) -> Recipe:
    """PPO (arXiv:1707.06347): a critic predicts the reward of a completion at each token. The table
    [critic] configures it; the divergence from the reference belongs in the reward.

    Formula:
      token mean of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
      A = (a - mean) / std over the tokens of the batch, a = sum of (gamma lam)^l delta to come
      delta = reward + gamma V of the next token - V, returns = a + V
      critic: token mean of max((v - returns)^2, (clip(v, V -+ value_clip) - returns)^2) / 2

    Args:
      gamma: discount from one token to the next.
      lam: 0 trusts the critic, 1 the rewards (arXiv:1506.02438).
      value_clip: largest change of a value, per rollout, that pays.
      value_lam: lam of the critic's returns; that of the advantages when absent. With 1 the critic
        learns from the rewards alone, so it may start untrained (VC-PPO, arXiv:2503.01491).

    Example:
      >>> ppo()
      Recipe(objective(clipped(over_sampler, low=0.2, high=0.2), token_mean), partial(generalized,
        gamma=1.0, lam=0.95), critic=Critic(objective(value_loss(clip=0.2), token_mean),
        partial(lambda_returns, gamma=1.0, lam=0.95)))

    Raises:
      ValueError: for a clip, a discount or a lam out of range.
    """
    value_lam = lam if value_lam is None else value_lam
    for name, value in {"gamma": gamma, "lam": lam, "value_lam": value_lam}.items():
        bounds.fraction(name, value)
    policy = clipped(ratio, low=clip_low, high=clip_high)
    return Recipe(
        objective(policy, token_mean),
        functools.partial(advantages.generalized, gamma=gamma, lam=lam),
        critic=Critic(
            objective(value_loss(clip=value_clip), token_mean),
            functools.partial(advantages.lambda_returns, gamma=gamma, lam=value_lam),
        ),
    )
