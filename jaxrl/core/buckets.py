"""Array sizes to compile programs for: few sizes, little padding."""

import jax.numpy as jnp

from jaxrl.core.precision import Precision


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


def row_multiple(parts: int, *, precision: Precision) -> int:
    """Returns the number of which a decoded batch's rows are a multiple if they have `parts` on
    devices. With fixed sums a device has as many as a product of its own would be padded to
    (`models.products`), where the rows of all devices count."""
    if parts == 1 or precision.sums == "any":
        return parts
    return parts * (16 if precision.compute == jnp.bfloat16 else 2)
