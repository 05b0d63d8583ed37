"""What an answer was worth beyond expectation, from its rewards (host, numpy)."""

from jaxrl.advantages.gae import gae
from jaxrl.advantages.groups import (
    AdvantageEstimator,
    centred,
    group_relative,
    leave_one_out,
    zero_std_groups,
)

__all__ = [
    "AdvantageEstimator",
    "centred",
    "gae",
    "group_relative",
    "leave_one_out",
    "zero_std_groups",
]
