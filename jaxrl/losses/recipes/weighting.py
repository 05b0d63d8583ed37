"""Algorithms whose importance weights are fixed numbers: policy gradients, corrected."""

import math

from jaxrl.advantages import centred, group_relative
from jaxrl.losses import bounds
from jaxrl.losses.aggregation import token_mean
from jaxrl.losses.algebra import TokenLoss, Weights, objective, prefix
from jaxrl.losses.corrections import gamma_shaped, truncated
from jaxrl.losses.ratios import Ratio, over_sampler, product
from jaxrl.losses.recipe import Recipe
from jaxrl.losses.regularizers import drift_penalty
from jaxrl.losses.rejections import within_variation
from jaxrl.losses.surrogates import likelihood, unclipped


def _weighted(weights: Weights) -> TokenLoss:
    """Returns -w A log pi. The metrics of the weights are prefixed with "weight/", because a
    correction of the config has the same names."""
    return prefix(weights, "weight/") * likelihood()


def pg_seq_is(*, high: float = math.inf, ratio: Ratio = over_sampler) -> Recipe:
    """The policy gradient with the importance weight of whole sequences (arXiv:2510.26788).

    Formula:
      token mean of -sg(min(W, high)) A log pi
      W = product of r over the sequence
      A = reward - mean of the group

    Args:
      high: bound on the weight (3 in the paper's "_seq_mis" scripts, which truncate); none by
        default.

    Example:
      >>> pg_seq_is()
      Recipe(objective(prefix(truncated(product(over_sampler), low=0.0, high=inf), 'weight/') *
        likelihood(), token_mean), centred)
    """
    loss = _weighted(truncated(product(ratio), high=high))
    return Recipe(objective(loss, token_mean), centred)


def pg_token_is(*, high: float = math.inf, ratio: Ratio = over_sampler) -> Recipe:
    """The policy gradient with the importance weight of each token (arXiv:2510.26788).

    Formula:
      token mean of -sg(min(r, high)) A log pi
      A = reward - mean of the group

    Args:
      high: bound on the weight; none by default.

    Example:
      >>> pg_token_is()
      Recipe(objective(prefix(truncated(over_sampler, low=0.0, high=inf), 'weight/') *
        likelihood(), token_mean), centred)
    """
    return Recipe(objective(_weighted(truncated(ratio, high=high)), token_mean), centred)


def cispo(*, low: float = 0.0, high: float = 5.0, ratio: Ratio = over_sampler) -> Recipe:
    """CISPO (MiniMax-M1, arXiv:2506.13585): clips the weight and not the gradient. The defaults are
    TRL's; low = 0.8, high = 1.2 are veRL's and NeMo's.

    Formula:
      token mean of -sg(clip(r, low, high)) A log pi
      A as in grpo

    Args:
      low: least weight.
      high: largest weight.

    Example:
      >>> cispo()
      Recipe(objective(prefix(truncated(over_sampler, low=0.0, high=5.0), 'weight/') *
        likelihood(), token_mean), group_relative)
    """
    loss = _weighted(truncated(ratio, low=low, high=high))
    return Recipe(objective(loss, token_mean), group_relative)


def vespo(
    *,
    k_positive: float = 2.0,
    lam_positive: float = 3.0,
    k_negative: float = 3.0,
    lam_negative: float = 2.0,
    ratio: Ratio = over_sampler,
) -> Recipe:
    """VESPO (arXiv:2602.10693): a smooth weight of whole sequences that falls off on both sides.

    Formula:
      token mean of -sg(phi) A log pi
      phi = W^k exp(lam (1 - W)), W = product of r over the sequence
      A as in grpo

    Args:
      k_positive: k where A >= 0.
      lam_positive: lam where A >= 0.
      k_negative: k where A < 0.
      lam_negative: lam where A < 0.

    Example:
      >>> vespo()
      Recipe(objective(prefix(gamma_shaped(product(over_sampler), positive=(2.0, 3.0),
        negative=(3.0, 2.0)), 'weight/') * likelihood(), token_mean), group_relative)
    """
    weights = gamma_shaped(
        product(ratio),
        positive=(k_positive, lam_positive),
        negative=(k_negative, lam_negative),
    )
    return Recipe(objective(_weighted(weights), token_mean), group_relative)


def dppo(
    *,
    low: float = 0.2,
    high: float = 0.2,
    cap: float = 20.0,
    ratio: Ratio = over_sampler,
) -> Recipe:
    """DPPO in total variation (arXiv:2602.04879): a trust region for probabilities, not for their
    ratio, so that rare tokens may move.

    Formula:
      token mean of -keep sg(min(r, cap)) A log pi
      keep = p - q <= high where A > 0, p - q >= -low elsewhere; p the learner's probability of the
        token, q that of the ratio's other policy
      A as in grpo

    Args:
      low: largest fall of a probability.
      high: largest rise of a probability.
      cap: bound on the weight.

    Example:
      >>> dppo()
      Recipe(objective(within_variation(over_sampler, low=0.2, high=0.2) *
        (prefix(truncated(over_sampler, low=0.0, high=20.0), 'weight/') * likelihood()),
        token_mean), group_relative)
    """
    weighted = _weighted(truncated(ratio, high=cap))
    loss = within_variation(ratio, low=low, high=high) * weighted
    return Recipe(objective(loss, token_mean), group_relative)


def prime(
    *,
    low: float = 0.2,
    high: float = 0.2,
    drift: float = 1e-3,
    ratio: Ratio = over_sampler,
) -> Recipe:
    """The default of prime-rl in early 2026, "DPPO+KL" (the framework: arXiv:2512.16144): DPPO's
    trust region, and a penalty on the distance from the sampler. INTELLECT-3 itself was trained
    with masked ratios; later versions reject |p - q| > .3 for either sign of A.

    Formula:
      token mean of -keep r A + drift (log r)^2
      keep as in dppo
      A = reward - mean of the group

    Args:
      low: largest fall of a probability.
      high: largest rise of a probability.
      drift: coefficient of the penalty.

    Example:
      >>> prime()
      Recipe(objective(within_variation(over_sampler, low=0.2, high=0.2) * unclipped(over_sampler)
        + 0.001 * drift_penalty(over_sampler), token_mean), centred)
    """
    bounds.not_negative("drift", drift)
    policy = within_variation(ratio, low=low, high=high) * unclipped(ratio)
    return Recipe(objective(policy + drift * drift_penalty(ratio), token_mean), centred)
