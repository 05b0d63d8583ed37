"""Advantages: the worth of a completion beyond expectation, from its rewards (host, numpy)."""

from jaxrl.advantages.baselines import gdpo, opo, reinforce_pp, reinforce_pp_baseline, remax
from jaxrl.advantages.critic import explained_variance, generalized, lambda_returns
from jaxrl.advantages.gae import gae
from jaxrl.advantages.groups import (
    centred,
    group_relative,
    leave_one_out,
    max_rl,
    pass_at_k,
    zero_std_groups,
)
from jaxrl.advantages.outcomes import (
    AdvantageEstimator,
    Advantages,
    Outcomes,
    by_component,
    compares_group,
    estimate,
    reads_components,
    within_group,
)

__all__ = [
    "AdvantageEstimator",
    "Advantages",
    "Outcomes",
    "by_component",
    "centred",
    "compares_group",
    "estimate",
    "explained_variance",
    "gae",
    "gdpo",
    "generalized",
    "group_relative",
    "lambda_returns",
    "leave_one_out",
    "max_rl",
    "opo",
    "pass_at_k",
    "reads_components",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "within_group",
    "zero_std_groups",
]
