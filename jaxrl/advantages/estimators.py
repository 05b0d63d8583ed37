"""The estimators that a config can name."""

from jaxrl.advantages.baselines import (
    gdpo,
    opo,
    optimal_token_baseline,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    turn_relative,
)
from jaxrl.advantages.groups import (
    batch_relative,
    centred,
    gpg,
    group_relative,
    leave_one_out,
    leave_one_out_relative,
    leave_one_out_whitened,
    max_rl,
    pass_at_k,
    pass_at_k_relative,
)

__all__ = [
    "batch_relative",
    "centred",
    "gdpo",
    "gpg",
    "group_relative",
    "leave_one_out",
    "leave_one_out_relative",
    "leave_one_out_whitened",
    "max_rl",
    "opo",
    "optimal_token_baseline",
    "pass_at_k",
    "pass_at_k_relative",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "turn_relative",
]
