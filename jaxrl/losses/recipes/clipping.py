"""Algorithms that bound the importance ratio: GRPO and its kin."""

from jaxrl.advantages import centred, group_relative
from jaxrl.losses import bounds
from jaxrl.losses.aggregation import fixed_length, sequence_mean_token_mean, token_mean
from jaxrl.losses.corrections import masked, truncated
from jaxrl.losses.objectives import objective
from jaxrl.losses.ratios import (
    Level,
    Ratio,
    anchor_over_sampler,
    over_anchor,
    over_sampler,
    product,
    sequence,
)
from jaxrl.losses.recipe import Recipe
from jaxrl.losses.regularizers import absolute, drift_penalty
from jaxrl.losses.rejections import off_policy_negatives
from jaxrl.losses.selections import top_covariance, without_covariance
from jaxrl.losses.surrogates import clipped, geometric_clipped, soft_gated, unclipped


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    cap: float | None = None,
    ratio: Ratio = over_sampler,
) -> Recipe:
    """GRPO (arXiv:2402.03300): PPO's clip, with advantages relative to the group.

    Formula:
      sequence mean of token mean of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
      A = (reward - mean) / (std + 1e-6) of the group

    Args:
      clip_low: the ratio pays down to 1 - clip_low.
      clip_high: the ratio pays up to 1 + clip_high.
      dual_clip: where A < 0 the loss is at most -dual_clip A (arXiv:1912.09729; 3 in veRL); none by
        default.
      cap: upper bound on the ratio, before the clip (INTELLECT-2, arXiv:2505.07291; 4 there); none
        by default.
      ratio: the policies that are compared.

    Example:
      >>> grpo()
      Recipe(objective(clipped(over_sampler, low=0.2, high=0.2), sequence_mean_token_mean),
        group_relative)

    Raises:
      ValueError: for a clip out of range.
    """
    policy = clipped(ratio, low=clip_low, high=clip_high, dual=dual_clip, cap=cap)
    return Recipe(objective(policy, sequence_mean_token_mean), group_relative)


def dr_grpo(
    *, max_length: int, clip_low: float = 0.2, clip_high: float = 0.2, ratio: Ratio = over_sampler
) -> Recipe:
    """Dr. GRPO (arXiv:2503.20783): GRPO without its two biases, the division by the group's
    standard deviation and the one by the length.

    Formula:
      sum over tokens of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) / (sequences max_length)
      A = reward - mean of the group

    Args:
      max_length: the longest completion that the sampler may draw, in tokens; in a config by
        default sampling.max_tokens.

    Example:
      >>> dr_grpo(max_length=1024)
      Recipe(objective(clipped(over_sampler, low=0.2, high=0.2), fixed_length(1024)), centred)
    """
    policy = clipped(ratio, low=clip_low, high=clip_high)
    return Recipe(objective(policy, fixed_length(max_length)), centred)


def dapo(*, clip_low: float = 0.2, clip_high: float = 0.28, ratio: Ratio = over_sampler) -> Recipe:
    """DAPO (arXiv:2503.14476): GRPO with more room above than below, and equal weight for every
    token of the batch. Its overlong penalty is reward.overlong_buffer; it samples dynamically.

    Formula:
      token mean of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
      A as in grpo

    Example:
      >>> dapo()
      Recipe(objective(clipped(over_sampler, low=0.2, high=0.28), token_mean), group_relative)
    """
    policy = clipped(ratio, low=clip_low, high=clip_high)
    return Recipe(objective(policy, token_mean), group_relative)


def bnpo(*, clip_low: float = 0.2, clip_high: float = 0.2, ratio: Ratio = over_sampler) -> Recipe:
    """BNPO as TRL has it (after arXiv:2506.02864): GRPO with equal weight for every token. TRL
    divides by the tokens of each device's part of a batch, this recipe by all tokens of the batch.

    Formula:
      token mean of -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
      A as in grpo

    Example:
      >>> bnpo()
      Recipe(objective(clipped(over_sampler, low=0.2, high=0.2), token_mean), group_relative)
    """
    return dapo(clip_low=clip_low, clip_high=clip_high, ratio=ratio)


def gspo(
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    level: Level = sequence,
    ratio: Ratio = over_sampler,
) -> Recipe:
    """GSPO (arXiv:2507.18071): GRPO with one ratio for a sequence, the geometric mean of its
    tokens'.

    Formula:
      sequence mean of token mean of -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)
      s = exp(mean of log r), with each token's own gradient
      A as in grpo

    Args:
      level: `sequence` gives each token the gradient of its own log-prob (veRL, SkyRL); `geometric`
        lets the gradient through the mean (TRL, OpenRLHF, NeMo). They differ where the tokens of a
        sequence differ in advantage or weight.

    Example:
      >>> gspo()
      Recipe(objective(clipped(sequence(over_sampler), low=0.0003, high=0.0004),
        sequence_mean_token_mean), group_relative)
    """
    policy = clipped(level(ratio), low=clip_low, high=clip_high)
    return Recipe(objective(policy, sequence_mean_token_mean), group_relative)


def gmpo(*, clip_low: float = 0.4, clip_high: float = 0.4, ratio: Ratio = over_sampler) -> Recipe:
    """GMPO (arXiv:2507.20673): the geometric mean over a sequence of bounded ratios, in place of
    the arithmetic one.

    Formula:
      sequence mean of -exp(mean of d') A
      d' = min(log r, clip_high) where A >= 0, max(log r, -clip_low) where A < 0
      A as in grpo

    Args:
      clip_low: bound on the log-ratio below 0.
      clip_high: bound on the log-ratio above 0.

    Example:
      >>> gmpo()
      Recipe(objective(geometric_clipped(over_sampler, low=0.4, high=0.4),
        sequence_mean_token_mean), group_relative)
    """
    policy = geometric_clipped(ratio, low=clip_low, high=clip_high)
    return Recipe(objective(policy, sequence_mean_token_mean), group_relative)


def sapo(*, positive: float = 1.0, negative: float = 1.05, ratio: Ratio = over_sampler) -> Recipe:
    """SAPO (arXiv:2511.20347): GRPO with a soft gate in place of the clip.

    Formula:
      sequence mean of token mean of -sigmoid(tau (r - 1)) 4 / tau A
      tau = positive where A > 0, negative elsewhere
      A as in grpo

    Args:
      positive: temperature of the gate where A > 0.
      negative: temperature elsewhere; larger fades sooner.

    Example:
      >>> sapo()
      Recipe(objective(soft_gated(over_sampler, positive=1.0, negative=1.05),
        sequence_mean_token_mean), group_relative)
    """
    policy = soft_gated(ratio, positive=positive, negative=negative)
    return Recipe(objective(policy, sequence_mean_token_mean), group_relative)


def grpo_token_tis(*, high: float = 2.0, clip_low: float = 0.2, clip_high: float = 0.2) -> Recipe:
    """GRPO with truncated importance sampling per token (Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training").

    Formula:
      grpo's loss over the anchor, times min(w, high)
      w = anchor / sampler, of the token

    Args:
      high: bound on the weight.

    Example:
      >>> grpo_token_tis()
      Recipe(objective(truncated(anchor_over_sampler, low=0.0, high=2.0) * clipped(over_anchor,
        low=0.2, high=0.2), sequence_mean_token_mean), group_relative)
    """
    policy = clipped(over_anchor, low=clip_low, high=clip_high)
    loss = truncated(anchor_over_sampler, high=high) * policy
    return Recipe(objective(loss, sequence_mean_token_mean), group_relative)


def grpo_seq_mis(*, high: float = 10.0, clip_low: float = 0.2, clip_high: float = 0.2) -> Recipe:
    """GRPO with masked importance sampling per sequence (Liu et al. 2025, "When speed kills
    stability"; arXiv:2510.26788).

    Formula:
      grpo's loss over the anchor, times W where W <= high and 0 elsewhere
      W = anchor / sampler, of the whole sequence

    Args:
      high: sequences of larger weight are left out.

    Example:
      >>> grpo_seq_mis()
      Recipe(objective(masked(product(anchor_over_sampler), low=0.0, high=10.0) *
        clipped(over_anchor, low=0.2, high=0.2), sequence_mean_token_mean), group_relative)
    """
    policy = clipped(over_anchor, low=clip_low, high=clip_high)
    loss = masked(product(anchor_over_sampler), high=high) * policy
    return Recipe(objective(loss, sequence_mean_token_mean), group_relative)


def opsm(
    *,
    delta: float = 0.5,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio: Ratio = over_sampler,
) -> Recipe:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556): GRPO without the bad
    completions that have become unlikely under the learner.

    Formula:
      grpo's loss, 0 for sequences with A < 0 and mean of -log r > delta
      A as in grpo

    Args:
      delta: nats per token; the paper gives none, TRL's manual 0.5, slime's default is 1e-4.

    Example:
      >>> opsm()
      Recipe(objective(off_policy_negatives(over_sampler, delta=0.5) * clipped(over_sampler,
        low=0.2, high=0.2), sequence_mean_token_mean), group_relative)
    """
    policy = clipped(ratio, low=clip_low, high=clip_high)
    loss = off_policy_negatives(ratio, delta=delta) * policy
    return Recipe(objective(loss, sequence_mean_token_mean), group_relative)


def clip_cov(
    *,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio: Ratio = over_sampler,
) -> Recipe:
    """Clip-Cov (arXiv:2505.22617): the entropy falls by the covariance of log-prob and advantage;
    some of the tokens with a large part in it get no gradient. It costs a forward pass.

    Formula:
      token mean of -keep min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
      keep = 0 for share x the tokens of the batch, drawn among those with low < c < high
      c = (log pi - mean) (A - mean), means over the tokens of the batch
      A as in grpo

    Args:
      share: share of the tokens that are drawn.
      low: lower bound of c.
      high: upper bound of c.

    Example:
      >>> clip_cov()
      Recipe(objective(without_covariance(0.0002, low=1.0, high=5.0) * clipped(over_sampler,
        low=0.2, high=0.2), token_mean), group_relative)
    """
    policy = clipped(ratio, low=clip_low, high=clip_high)
    loss = without_covariance(share, low=low, high=high) * policy
    return Recipe(objective(loss, token_mean), group_relative)


def kl_cov(*, share: float = 2e-4, kl_cov: float = 1.0, ratio: Ratio = over_sampler) -> Recipe:
    """KL-Cov (arXiv:2505.22617): as clip_cov, but the tokens with the largest part in the
    covariance are held near the ratio's other policy. It costs a forward pass. The paper's share is
    .002 for 7B and .0002 for 32B parameters; the divergence is |log r|, as in its code.

    Formula:
      token mean of -r A + kl_cov top |log r|
      top = 1 for share x the tokens of the batch, those with the largest c
      c as in clip_cov
      A as in grpo

    Args:
      share: share of the tokens that are held.
      kl_cov: coefficient of their penalty.

    Example:
      >>> kl_cov()
      Recipe(objective(unclipped(over_sampler) + 1.0 * (top_covariance(0.0002) *
        drift_penalty(over_sampler, absolute)), token_mean), group_relative)
    """
    bounds.not_negative("kl_cov", kl_cov)
    held = top_covariance(share) * drift_penalty(ratio, absolute)
    return Recipe(objective(unclipped(ratio) + kl_cov * held, token_mean), group_relative)
