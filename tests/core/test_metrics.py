"""Means merge exactly and never read what the mask leaves out."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from jaxrl.core.metrics import Latest, Mean, masked_mean, merge, to_floats

SHAPE = (3, 4)


@settings(max_examples=20, derandomize=True, deadline=None, database=None)
@given(
    values=hnp.arrays(np.float32, SHAPE, elements=st.integers(-99, 99).map(float)),
    mask=hnp.arrays(bool, SHAPE),
    cut=st.integers(0, 3),
)
def test_merged_means_equal_the_whole(values, mask, cut):
    whole = masked_mean(jnp.asarray(values), jnp.asarray(mask))
    # Padded parts, not slices: one shape compiles once.
    first, second = ((np.arange(3) < cut)[:, None] & mask, (np.arange(3) >= cut)[:, None] & mask)
    merged = masked_mean(jnp.asarray(values), jnp.asarray(first)) + masked_mean(
        jnp.asarray(values), jnp.asarray(second)
    )
    assert (merged.total, merged.weight) == (whole.total, whole.weight)
    expected = values[mask].mean() if mask.any() else 0.0
    assert whole.value == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert to_floats({"x": whole}) == (
        {"x": pytest.approx(expected, rel=1e-5, abs=1e-6)} if mask.any() else {}
    )


def test_latest_keeps_the_later_number():
    """Four updates with one skipped: one was skipped, not a half."""
    found = {}
    for skipped in (0.0, 0.0, 1.0, 1.0):
        later = {
            "skipped": Latest(jnp.float32(skipped), jnp.float32(1)),
            "loss": Mean(jnp.float32(skipped), jnp.float32(1)),
        }
        found = merge(found, later)
    assert to_floats(found) == {"skipped": 1.0, "loss": 0.5}


def test_masked_entries_are_never_read():
    values = jnp.array([1.0, jnp.nan, jnp.inf, 3.0])
    assert masked_mean(values, jnp.array([1, 0, 0, 1])).value == 2.0


def test_masked_mean_is_f32():
    assert masked_mean(jnp.array([True, False, True]), jnp.ones(3, bool)).total == 2.0
    many = jnp.ones(4096, jnp.bfloat16)  # a bf16 sum would stop at 256
    assert masked_mean(many, jnp.ones(4096, bool)).total == 4096.0


def test_to_floats_divides_in_f64():
    third = Mean(jnp.float32(1), jnp.float32(3))
    assert to_floats({"third": third}) == {"third": 1 / 3}
