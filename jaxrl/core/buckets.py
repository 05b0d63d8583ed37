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


def row_multiple(parts: int, *, precision: Precision | str) -> int:
    """Returns the number of which the rows of a decoded batch are a multiple, for this many devices
    with parts of it.

    With fixed sums each device has as many rows as products on one device are padded to. A product
    over several devices is padded by the rows of all, and each might be left with one.

    Example:
      >>> row_multiple(8, precision="bf16_master"), row_multiple(8, precision="fp32,sums=fixed")
      (8, 16)
    """
    precision = Precision.of(precision)
    if parts == 1 or precision.sums == "any":
        return parts
    return parts * (16 if precision.compute == jnp.bfloat16 else 2)
