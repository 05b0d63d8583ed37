"""Sizes that compiled programs are made for: few of them, and little padding."""


def length_bucket(length: int, *, step: int) -> int:
    """The smallest size that holds `length` out of the multiples of `step` up to 4 * step and four
    sizes per doubling from there on: at most a fifth of a long one is padding."""
    while length > 8 * step:
        step *= 2
    return -(-length // step) * step


def count_bucket(count: int, *, multiple: int = 1) -> int:
    """The smallest power of two times `multiple` that holds `count`."""
    size = multiple
    while size < count:
        size *= 2
    return size
