"""The reward of the phantom-clipping runs."""

from collections.abc import Mapping
from typing import Any


def minus_length(completion: str, example: Mapping[str, Any]) -> float:
    """Minus the number of characters, which are tokens here; the best answer is empty."""
    return -float(len(completion))
