"""Losses composed like numbers: `clipped(over_sampler) + 0.001 * kl_penalty()`.

A ratio names the policies that are compared, a surrogate turns ratio and advantage into a loss per
token, corrections reweight it, regularizers are added, and one aggregation reduces it. Every part
prints as the expression that makes it.

Example:
  >>> weights = truncated(anchor_over_sampler, high=2)
  >>> weights * clipped(over_anchor) + 0.001 * kl_penalty()
  truncated(anchor_over_sampler, low=0.0, high=2) * clipped(over_anchor, low=0.2, high=0.2)
  + 0.001 * kl_penalty(k3)
"""

from jaxrl.losses.aggregation import (
    fixed_length,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    token_mean,
    token_sum,
)
from jaxrl.losses.algebra import (
    Shift,
    TokenLoss,
    Weights,
    add,
    both,
    prefix,
    reweight,
    scale,
    token_loss,
    whole_batch,
)
from jaxrl.losses.controllers import Controller, EntropyController, KLController, controlled
from jaxrl.losses.corrections import gamma_shaped, masked, truncated
from jaxrl.losses.from_config import build
from jaxrl.losses.imitation import observation_likelihood, positive_likelihood
from jaxrl.losses.objectives import Aggregation, Objective, objective
from jaxrl.losses.ratios import (
    Level,
    Ratio,
    anchor_over_sampler,
    geometric,
    on_policy,
    over_anchor,
    over_sampler,
    product,
    sequence,
    shadowed,
    token,
)
from jaxrl.losses.recipe import Recipe, Terms, with_terms
from jaxrl.losses.recipes import *  # noqa: F403
from jaxrl.losses.regularizers import (
    KLEstimator,
    absolute,
    drift_penalty,
    entropy_bonus,
    k1,
    k1_plus,
    k2,
    k3,
    k3_plus,
    kl_penalty,
    load_balance,
    squared,
)
from jaxrl.losses.rejections import (
    Divergence,
    binary_kl,
    error_within,
    k3_within,
    near,
    off_policy_negatives,
    total_variation,
    trust_region,
    vetoed,
    within,
)
from jaxrl.losses.scores import Need, Scores, one_sequence, require
from jaxrl.losses.selections import top_covariance, top_entropy, without_covariance
from jaxrl.losses.surrogates import (
    clipped,
    geometric_clipped,
    likelihood,
    reinforce,
    soft_gated,
    surrogate,
    unclipped,
)
from jaxrl.losses.value import Critic, clipped_value_loss, value_loss
