"""Advantages: the worth of a completion beyond expectation, from its rewards (host, numpy)."""

from jaxrl.advantages.baselines import gdpo, opo, reinforce_pp, reinforce_pp_baseline, remax
from jaxrl.advantages.critic import (
    explained_variance,
    gae,
    generalized,
    lambda_returns,
    length_adaptive,
)
from jaxrl.advantages.groups import (
    batch_relative,
    centred,
    group_relative,
    leave_one_out,
    leave_one_out_relative,
    max_rl,
    pass_at_k,
    zero_std_groups,
)
from jaxrl.advantages.outcomes import (
    AdvantageEstimator,
    Advantages,
    Outcomes,
    by_component,
    estimate,
    is_marked,
    within_group,
)
