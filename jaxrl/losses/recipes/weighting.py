"""Algorithms whose importance weights are fixed numbers: policy gradients, corrected."""

import math

from jaxrl.advantages import centred, group_relative, leave_one_out_relative
from jaxrl.losses import bounds
from jaxrl.losses.aggregation import token_mean
from jaxrl.losses.algebra import TokenLoss, Weights, prefix
from jaxrl.losses.corrections import gamma_shaped, truncated
from jaxrl.losses.objectives import objective
from jaxrl.losses.ratios import Ratio, anchor_over_sampler, geometric, over_sampler, product
from jaxrl.losses.recipe import Recipe
from jaxrl.losses.regularizers import drift_penalty
from jaxrl.losses.rejections import (
    Divergence,
    error_within,
    near,
    total_variation,
    trust_region,
    within,
)
from jaxrl.losses.surrogates import likelihood, reinforce, unclipped


def _weighted(weights: Weights) -> TokenLoss:
    """Returns -w A log pi. The prefix "weight/" tells the weights' metrics from the metrics of a
    config's correction."""
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
        product(ratio), positive=(k_positive, lam_positive), negative=(k_negative, lam_negative)
    )
    return Recipe(objective(_weighted(weights), token_mean), group_relative)


def mlperf(*, low: float = 0.999, high: float = 1.002, error: float = 2.0) -> Recipe:
    """The GRPO recipe of MLPerf Training (mlcommons/training, llm_post_training): REINFORCE with
    RLOO's baseline (arXiv:2402.14740), corrected for the mismatch. It costs a forward pass. The
    rest is configured: one update per rollout, and truncated completions are left out.

    Formula:
      token mean of -w A log pi
      w = anchor / sampler of the token; 0 in sequences whose geometric mean of it is not in low to
        high
      A = (reward - mean of the others) / (std of the others + 1e-6) in the group
      sequences whose mean of e^|log w| exceeds error leave the batch

    Args:
      low: least geometric mean.
      high: largest geometric mean.
      error: largest mean error of a sequence.

    Example:
      >>> mlperf()
      Recipe(objective(within(geometric(anchor_over_sampler), low=0.999, high=1.002) *
        (prefix(truncated(anchor_over_sampler, low=0.0, high=inf), 'weight/') * reinforce()),
        token_mean, among=error_within(anchor_over_sampler, high=2.0)), leave_one_out_relative)
    """
    corrected = prefix(truncated(anchor_over_sampler, high=math.inf), "weight/") * reinforce()
    loss = within(geometric(anchor_over_sampler), low=low, high=high) * corrected
    among = error_within(anchor_over_sampler, high=error)
    return Recipe(objective(loss, token_mean, among=among), leave_one_out_relative)


def dppo(
    *,
    divergence: Divergence = total_variation,
    low: float = 0.2,
    high: float = 0.2,
    cap: float = 20.0,
    ratio: Ratio = over_sampler,
) -> Recipe:
    """DPPO (arXiv:2602.04879): a trust region for the divergence of a token's probability, not for
    its ratio, so that rare tokens may move. veRL's script has low = high = 0.15 for
    total_variation and 0.05 for binary_kl; SkyRL 0.2 and 0.05.

    Formula:
      token mean of -keep sg(min(r, cap)) A log pi
      keep = 0 where A > 0, p > q and D(p, q) > high or A <= 0, p < q and D(p, q) > low; p the
        learner's probability of the token, q the probability under the ratio's other policy
      A as in grpo

    Args:
      divergence: D; total_variation, |p - q|, or binary_kl.
      low: largest divergence of a probability that falls.
      high: largest divergence of a probability that rises.
      cap: bound on the weight.

    Example:
      >>> dppo()
      Recipe(objective(trust_region(over_sampler, total_variation, low=0.2, high=0.2) *
        (prefix(truncated(over_sampler, low=0.0, high=20.0), 'weight/') * likelihood()),
        token_mean), group_relative)
    """
    weighted = _weighted(truncated(ratio, high=cap))
    loss = trust_region(ratio, divergence, low=low, high=high) * weighted
    return Recipe(objective(loss, token_mean), group_relative)


def prime(
    *, low: float = 0.2, high: float = 0.2, drift: float = 1e-3, ratio: Ratio = over_sampler
) -> Recipe:
    """The default of prime-rl, "DPPO+KL" (the framework: arXiv:2512.16144): DPPO's trust region,
    and a penalty on the distance from the sampler. INTELLECT-3 itself was trained with masked
    ratios.

    Formula:
      token mean of -keep r A + drift (log r)^2
      keep = p - q <= high where A > 0, p - q >= -low elsewhere; p, q as in dppo
      A = reward - mean of the group

    Args:
      low: largest fall of a probability.
      high: largest rise of a probability.
      drift: coefficient of the penalty.

    Example:
      >>> prime()
      Recipe(objective(trust_region(over_sampler, total_variation, low=0.2, high=0.2) *
        unclipped(over_sampler) + 0.001 * drift_penalty(over_sampler, squared), token_mean),
        centred)
    """
    region = trust_region(ratio, total_variation, low=low, high=high)
    return _drifting(region * unclipped(ratio), drift=drift, ratio=ratio)


def prime_ipo(*, high: float = 0.1, drift: float = 1e-3, ratio: Ratio = over_sampler) -> Recipe:
    """The loss "ipo" of prime-rl (the framework: arXiv:2512.16144), not the IPO of preference
    pairs: as prime, with a trust region that does not depend on the sign of the advantage.

    Formula:
      token mean of -keep r A + drift (log r)^2
      keep = |p - q| <= high; p, q as in dppo
      A = reward - mean of the group

    Args:
      high: largest change of a probability.
      drift: coefficient of the penalty.

    Example:
      >>> prime_ipo()
      Recipe(objective(near(over_sampler, total_variation, high=0.1) * unclipped(over_sampler) +
        0.001 * drift_penalty(over_sampler, squared), token_mean), centred)
    """
    region = near(ratio, total_variation, high=high)
    return _drifting(region * unclipped(ratio), drift=drift, ratio=ratio)


def _drifting(policy: TokenLoss, *, drift: float, ratio: Ratio) -> Recipe:
    bounds.not_negative("drift", drift)
    return Recipe(objective(policy + drift * drift_penalty(ratio), token_mean), centred)
