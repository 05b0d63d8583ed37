"""The way to a run's reward functions: here, or in the workers of a fleet."""

from collections.abc import Callable, Sequence

from jaxrl.environments import RewardTerm, load_rewards
from jaxrl.fleet.membership import membership


def reward_loader() -> Callable[..., Sequence[RewardTerm]]:
    """Returns a function with the parameters of `load_rewards`: itself, or one whose rewards the
    fleet's workers load and compute."""
    fleet = membership()
    if fleet is None or not fleet.workers:
        return load_rewards

    from jaxrl.fleet.workers import Workers  # needs Ray

    return Workers(fleet).load_rewards
