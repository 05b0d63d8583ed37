"""Sizes of padded arrays."""


def power_of_two(count: int) -> int:
    """Returns the smallest power of two that is at least `count`, so that few programs are
    compiled."""
    return 1 << (max(count, 1) - 1).bit_length()
