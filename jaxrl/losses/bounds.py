"""Bounds of a loss's numbers. Each check raises a ValueError that names the parameter, its value
and the bounds; NaN is always out of bounds."""

import math


def positive(name: str, value: float) -> None:
    """Checks a number that is greater than 0, and finite."""
    _expect(0 < value < math.inf, name, value, "> 0 and finite")


def not_negative(name: str, value: float) -> None:
    """Checks a number that is 0 or more, and finite, such as a coefficient."""
    _expect(0 <= value < math.inf, name, value, ">= 0 and finite")


def fraction(name: str, value: float) -> None:
    """Checks a number from 0 to 1, such as a discount."""
    _expect(0 <= value <= 1, name, value, "in [0, 1]")


def _expect(holds: bool, name: str, value: float, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value} must be {wanted}")
