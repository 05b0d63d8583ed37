"""Array sizes to compile programs for: few sizes, little padding."""


def length_bucket(length: int, *, step: int) -> int:
    """Returns the smallest bucket that holds `length`.

    Buckets are the multiples of `step` up to 8 * step and four sizes per doubling above that, so at
    most a fifth of a long one is padding.
    """
    while length > 8 * step:
        step *= 2
    return -(-length // step) * step


def count_bucket(count: int, *, multiple: int = 1) -> int:
    """Returns the smallest power of two times `multiple` that holds `count`."""
    size = multiple
    while size < count:
        size *= 2
    return size
