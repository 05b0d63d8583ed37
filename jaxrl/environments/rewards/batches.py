"""Reward functions of all completions at once."""

from collections.abc import Callable
from typing import Any

RewardFn = Callable[..., Any]  # `def` or `async def`

_BATCHED = "_jaxrl_batched"


def batched(function: RewardFn) -> RewardFn:
    """Marks a reward function of all completions: (list[str], list[Mapping]) -> N numbers."""
    setattr(function, _BATCHED, True)
    return function


def is_batched(function: RewardFn) -> bool:
    """Tells whether a function is marked by `batched`."""
    return hasattr(function, _BATCHED)
