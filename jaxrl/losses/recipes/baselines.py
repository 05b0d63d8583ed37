"""Algorithms that differ in their advantages; the policy term is PPO's, or REINFORCE's."""

import functools

from jaxrl import advantages
from jaxrl.losses import bounds
from jaxrl.losses.aggregation import sequence_mean_token_mean, token_mean
from jaxrl.losses.imitation import positive_likelihood
from jaxrl.losses.objectives import objective
from jaxrl.losses.ratios import Level, Ratio, on_policy, over_sampler, product
from jaxrl.losses.recipe import Recipe
from jaxrl.losses.surrogates import clipped, unclipped
from jaxrl.losses.value import Critic, value_loss


def rloo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    level: Level = product,
    ratio: Ratio = over_sampler,
) -> Recipe:
    """RLOO (arXiv:2402.14740): the baseline is the mean of the other completions; a completion is
    one action. The divergence from the reference belongs in the reward: reward.kl = 0.05 in TRL.

    Formula:
      sequence mean of -min(R A, clip(R, 1 - clip_low, 1 + clip_high) A)
      R = product of r over the sequence
      A = reward - mean of the others in the group

    Args:
      level: `product`, or `token` for a ratio of each token.

    Example:
      >>> rloo()
      Recipe(objective(clipped(product(over_sampler), low=0.2, high=0.2),
        sequence_mean_token_mean), leave_one_out)
    """
    policy = clipped(level(ratio), low=clip_low, high=clip_high)
    return Recipe(objective(policy, sequence_mean_token_mean), advantages.leave_one_out)


def reinforce_pp(
    *,
    gamma: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio: Ratio = over_sampler,
) -> Recipe:
    """REINFORCE++ (arXiv:2501.03262): no groups; the return from a token on, relative to the batch.
    The divergence from the reference belongs in the reward: reward.kl = 0.01 in OpenRLHF.

    Formula:
      token mean of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
      A = (G - mean) / std over the tokens of the batch, G = discounted sum of rewards to come

    Args:
      gamma: discount from one token to the next.

    Example:
      >>> reinforce_pp()
      Recipe(objective(clipped(over_sampler, low=0.2, high=0.2), token_mean), partial(reinforce_pp,
        gamma=1.0))

    Raises:
      ValueError: for a clip or a discount out of range.
    """
    bounds.fraction("gamma", gamma)
    policy = clipped(ratio, low=clip_low, high=clip_high)
    estimator = functools.partial(advantages.reinforce_pp, gamma=gamma)
    return Recipe(objective(policy, token_mean), estimator)


def reinforce_pp_baseline(
    *, clip_low: float = 0.2, clip_high: float = 0.2, ratio: Ratio = over_sampler
) -> Recipe:
    """REINFORCE++ with a baseline (arXiv:2501.03262): relative to the group first, then to
    the batch.

    Formula:
      token mean of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
      A = (a - mean) / std over the tokens of the batch, a = reward - mean of the group

    Example:
      >>> reinforce_pp_baseline()
      Recipe(objective(clipped(over_sampler, low=0.2, high=0.2), token_mean),
        reinforce_pp_baseline)
    """
    policy = clipped(ratio, low=clip_low, high=clip_high)
    return Recipe(objective(policy, token_mean), advantages.reinforce_pp_baseline)


def remax(*, ratio: Ratio = on_policy) -> Recipe:
    """ReMax (arXiv:2310.10505): the baseline is the reward of the greedy completion, which is
    sampled for every prompt.

    Formula:
      token mean of -r A
      A = reward - reward of the greedy completion

    Args:
      ratio: the policies that are compared; on_policy, r = 1, is REINFORCE.

    Example:
      >>> remax()
      Recipe(objective(unclipped(on_policy), token_mean), remax)
    """
    return Recipe(objective(unclipped(ratio), token_mean), advantages.remax)


def opo(*, ratio: Ratio = on_policy) -> Recipe:
    """OPO (arXiv:2505.23585): exactly on-policy, with the baseline of least variance.

    Formula:
      token mean of -r A
      A = reward - mean of the group weighted by length

    Args:
      ratio: the policies that are compared; on_policy, r = 1, is REINFORCE.

    Example:
      >>> opo()
      Recipe(objective(unclipped(on_policy), token_mean), opo)
    """
    return Recipe(objective(unclipped(ratio), token_mean), advantages.opo)


def gpg(*, ratio: Ratio = on_policy) -> Recipe:
    """GPG (arXiv:2504.02546): the policy gradient without a clip, a reference or a critic; groups
    without a gradient do not shrink the batch's.

    Formula:
      token mean of -r A
      A = alpha (reward - mean of the group)
      alpha = completions / completions in groups with different rewards

    Args:
      ratio: the policies that are compared; on_policy, r = 1, is REINFORCE.

    Example:
      >>> gpg()
      Recipe(objective(unclipped(on_policy), token_mean), gpg)
    """
    return Recipe(objective(unclipped(ratio), token_mean), advantages.gpg)


def pass_at_k(
    *, clip_low: float = 0.2, clip_high: float = 0.2, ratio: Ratio = over_sampler
) -> Recipe:
    """Policy gradient of the best of k completions (arXiv:2503.19595).

    Formula:
      sequence mean of token mean of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
      A = reward - second best reward for the best of the group, 0 for the others

    Example:
      >>> pass_at_k()
      Recipe(objective(clipped(over_sampler, low=0.2, high=0.2), sequence_mean_token_mean),
        pass_at_k)
    """
    policy = clipped(ratio, low=clip_low, high=clip_high)
    return Recipe(objective(policy, sequence_mean_token_mean), advantages.pass_at_k)


def max_rl(*, clip_low: float = 0.2, clip_high: float = 0.2, ratio: Ratio = over_sampler) -> Recipe:
    """Maximum likelihood RL (arXiv:2602.02710): the gradient of the log of the success rate; hard
    prompts weigh more. Rewards must not be negative.

    Formula:
      token mean of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
      A = (reward - mean) / mean of the group

    Example:
      >>> max_rl()
      Recipe(objective(clipped(over_sampler, low=0.2, high=0.2), token_mean), max_rl)
    """
    policy = clipped(ratio, low=clip_low, high=clip_high)
    return Recipe(objective(policy, token_mean), advantages.max_rl)


def gdpo(*, clip_low: float = 0.2, clip_high: float = 0.2, ratio: Ratio = over_sampler) -> Recipe:
    """GDPO (arXiv:2601.05242): GRPO for several rewards; each is made relative to its group before
    they are added.

    Formula:
      sequence mean of token mean of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
      A = (a - mean) / std over the batch, a = sum of weight (reward - mean) / std of the group

    Example:
      >>> gdpo()
      Recipe(objective(clipped(over_sampler, low=0.2, high=0.2), sequence_mean_token_mean), gdpo)
    """
    policy = clipped(ratio, low=clip_low, high=clip_high)
    return Recipe(objective(policy, sequence_mean_token_mean), advantages.gdpo)


def ppo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    gamma: float = 1.0,
    lam: float = 0.95,
    value_clip: float = 0.2,
    value_lam: float | None = None,
    value_huber: float | None = None,
    ratio: Ratio = over_sampler,
) -> Recipe:
    """PPO (arXiv:1707.06347): a critic predicts the reward of a completion at each token. The table
    [critic] configures the critic; the divergence from the reference belongs in the reward.

    Formula:
      token mean of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
      A = (a - mean) / std over the tokens of the batch, a = sum of (gamma lam)^l delta to come
      delta = reward + gamma V of the next token - V, returns = a + V; V after an end is 0
      critic: token mean of max((v - returns)^2, (clip(v, V -+ value_clip) - returns)^2) / 2

    Args:
      gamma: discount from one token to the next.
      lam: 0 trusts the critic, 1 the rewards (arXiv:1506.02438).
      value_clip: largest change of a value, per rollout, that pays.
      value_lam: lam of the critic's returns; the same as `lam` by default. With 1 the critic learns
        from the rewards alone, so it may start untrained (VC-PPO, arXiv:2503.01491).
      value_huber: distance of a value to its return beyond which the critic's loss is linear (10
        in AReaL); none by default.

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
        critic=_critic(value_clip=value_clip, huber=value_huber, gamma=gamma, lam=value_lam),
    )


def vapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    alpha: float = 0.05,
    positive_nll: float = 0.1,
    value_clip: float = 0.2,
    value_huber: float | None = None,
    ratio: Ratio = over_sampler,
) -> Recipe:
    """VAPO (arXiv:2504.05118): PPO with a lam that grows with the length of the completion, a
    critic that learns from the rewards alone, clip-higher, and the likelihood of right completions.
    The critic is to be trained first: critic.pretrain_steps, 50 in the paper.

    Formula:
      token mean of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + positive_nll L
      L = mean of -log pi over the tokens of completions whose reward is positive
      A as in ppo, with gamma = 1 and lam = 1 - 1 / (alpha length), at least 0
      critic: as in ppo, with value_lam = 1

    Args:
      alpha: the surprises to come add up to alpha x length.
      positive_nll: coefficient of the likelihood.
      value_clip: largest change of a value, per rollout, that pays.
      value_huber: distance of a value to its return beyond which the critic's loss is linear (10
        in AReaL); none by default.

    Example:
      >>> vapo()
      Recipe(objective(clipped(over_sampler, low=0.2, high=0.28), token_mean) + 0.1 *
        positive_likelihood(0.0), partial(length_adaptive, alpha=0.05),
        critic=Critic(objective(value_loss(clip=0.2), token_mean), partial(lambda_returns,
        gamma=1.0, lam=1.0)))

    Raises:
      ValueError: for an alpha that is not positive, or a negative coefficient.
    """
    bounds.positive("alpha", alpha)
    bounds.not_negative("positive_nll", positive_nll)
    policy = clipped(ratio, low=clip_low, high=clip_high)
    return Recipe(
        objective(policy, token_mean) + positive_nll * positive_likelihood(),
        functools.partial(advantages.length_adaptive, alpha=alpha),
        critic=_critic(value_clip=value_clip, huber=value_huber, gamma=1.0, lam=1.0),
    )


def _critic(*, value_clip: float, huber: float | None, gamma: float, lam: float) -> Critic:
    returns = functools.partial(advantages.lambda_returns, gamma=gamma, lam=lam)
    return Critic(objective(value_loss(clip=value_clip, huber=huber), token_mean), returns)
