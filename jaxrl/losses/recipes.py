"""Published algorithms, each a few lines of algebra.

A recipe is a function of keyword parameters that returns a `Recipe`: what the learner minimises and
how rewards become advantages. Every public function here can be named in a config, with its
parameters as keys. A KL coefficient of 0 needs no reference model. Runs of more than
1,000 steps should use `kl=0.001`: without it gradient norms grow slowly.
"""

from typing import NamedTuple

from jaxrl.advantages import AdvantageEstimator, centred, group_relative
from jaxrl.losses.aggregation import fixed_length, sequence_mean_token_mean, token_mean
from jaxrl.losses.algebra import Aggregation, Objective, objective
from jaxrl.losses.ratios import Ratio, over_sampler
from jaxrl.losses.regularizers import KLEstimator, k3, regularized
from jaxrl.losses.surrogates import clipped


class Recipe(NamedTuple):
    """An algorithm.

    Attributes:
      objective: what the learner minimises.
      advantages: rewards and groups -> advantages; `recipe._replace(advantages=...)` exchanges it.
    """

    objective: Objective
    advantages: AdvantageEstimator


def grpo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl: float = 0.0,
    kl_estimator: KLEstimator = k3,
    entropy: float = 0.0,
    ratio: Ratio = over_sampler,
    aggregation: Aggregation = sequence_mean_token_mean,
) -> Recipe:
    """GRPO (arXiv:2402.03300): clipped surrogate, advantages relative to the group, mean over
    sequences of the mean over tokens.

    Args:
      clip_low: the ratio pays down to 1 - clip_low.
      clip_high: the ratio pays up to 1 + clip_high.
      dual_clip: bound on the ratio where the advantage is negative; none by default.
      kl: coefficient of the divergence from the reference model (.04 in the paper).
      kl_estimator: how it is estimated.
      entropy: coefficient of the entropy bonus.
      ratio: which policies the ratio compares.
      aggregation: how tokens become one number.

    Raises:
      ValueError: for a coefficient or a clip out of range.
    """
    policy = clipped(ratio, low=clip_low, high=clip_high, dual=dual_clip)
    loss = regularized(policy, kl=kl, kl_estimator=kl_estimator, entropy=entropy)
    return Recipe(objective(loss, aggregation), group_relative)


def dr_grpo(
    *,
    max_length: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl: float = 0.0,
    kl_estimator: KLEstimator = k3,
    entropy: float = 0.0,
    ratio: Ratio = over_sampler,
) -> Recipe:
    """Dr. GRPO (arXiv:2503.20783): GRPO without its two biases. Advantages are centred and not
    divided by the group's standard deviation, and every token counts the same: the sum is divided
    by sequences x `max_length`, the longest completion that the sampler may draw.

    Other parameters as in `grpo`.
    """
    return grpo(
        clip_low=clip_low,
        clip_high=clip_high,
        kl=kl,
        kl_estimator=kl_estimator,
        entropy=entropy,
        ratio=ratio,
        aggregation=fixed_length(max_length),
    )._replace(advantages=centred)


def dapo(
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    kl: float = 0.0,
    kl_estimator: KLEstimator = k3,
    entropy: float = 0.0,
    ratio: Ratio = over_sampler,
) -> Recipe:
    """The loss of DAPO (arXiv:2503.14476): GRPO with clip-higher and the mean over all tokens of
    the batch. Its dynamic sampling and its overlong penalty belong to the loop and to the reward.

    Parameters as in `grpo`.
    """
    return grpo(
        clip_low=clip_low,
        clip_high=clip_high,
        kl=kl,
        kl_estimator=kl_estimator,
        entropy=entropy,
        ratio=ratio,
        aggregation=token_mean,
    )
