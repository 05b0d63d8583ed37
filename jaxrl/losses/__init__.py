"""Losses composed like numbers: `clipped(over_sampler) + 0.001 * kl_penalty()`.

A ratio says which policies are compared, a surrogate turns ratio and advantage into a loss per
token, corrections reweight it, regularizers are added, and one aggregation reduces it.
"""

from jaxrl.losses.aggregation import (
    fixed_length,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    token_mean,
    token_sum,
)
from jaxrl.losses.algebra import (
    Aggregation,
    Need,
    Objective,
    Scores,
    Shift,
    TokenLoss,
    Weights,
    add,
    objective,
    prefix,
    reweight,
    scale,
    token_loss,
)
from jaxrl.losses.corrections import masked, truncated
from jaxrl.losses.named import build
from jaxrl.losses.ratios import (
    Ratio,
    anchor_over_sampler,
    geometric,
    on_policy,
    over_anchor,
    over_sampler,
    product,
    sequence,
    shadowed,
)
from jaxrl.losses.recipes import Recipe, dapo, dr_grpo, grpo
from jaxrl.losses.regularizers import (
    KLEstimator,
    entropy_bonus,
    k1,
    k1_plus,
    k2,
    k3,
    k3_plus,
    kl_penalty,
    regularized,
)
from jaxrl.losses.surrogates import clipped, reinforce, surrogate, unclipped

__all__ = [
    "Aggregation",
    "KLEstimator",
    "Need",
    "Objective",
    "Ratio",
    "Recipe",
    "Scores",
    "Shift",
    "TokenLoss",
    "Weights",
    "add",
    "anchor_over_sampler",
    "build",
    "clipped",
    "dapo",
    "dr_grpo",
    "entropy_bonus",
    "fixed_length",
    "geometric",
    "grpo",
    "k1",
    "k1_plus",
    "k2",
    "k3",
    "k3_plus",
    "kl_penalty",
    "masked",
    "objective",
    "on_policy",
    "over_anchor",
    "over_sampler",
    "prefix",
    "product",
    "regularized",
    "reinforce",
    "reweight",
    "scale",
    "sequence",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "shadowed",
    "surrogate",
    "token_loss",
    "token_mean",
    "token_sum",
    "truncated",
    "unclipped",
]
