"""The reward of the phantom-clipping runs."""

from collections.abc import Mapping
from typing import Any


def minus_length(completion: str, example: Mapping[str, Any]) -> float:
    """Returns minus the number of characters, here tokens; the best completion is empty."""
    return -float(len(completion))
