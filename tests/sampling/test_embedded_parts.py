"""Stop sequences and buckets."""

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.sampling.embedded.buckets import count_bucket, length_bucket
from jaxrl.sampling.embedded.stopping import empty_tail, ends_in_stop, push, stop_table


def test_a_completion_ends_at_a_stop_sequence():
    stops = ((2,), (0, 1), (1, 1, 0))
    table = stop_table(stops)
    completions = np.random.default_rng(0).integers(0, 3, (64, 8))

    @jax.jit
    def step(tail, tokens):
        tail = push(tail, tokens)
        return tail, ends_in_stop(tail, table)

    tail = empty_tail(64, table)
    for t in range(1, 9):
        tail, ended = step(tail, completions[:, t - 1])
        beginnings = [tuple(completion[:t]) for completion in completions]
        expected = [any(b[-len(s) :] == s for s in stops) for b in beginnings]
        np.testing.assert_array_equal(ended, expected)


@given(length=st.integers(1, 10**5), step=st.sampled_from([16, 64]))
def test_length_buckets_are_few_and_waste_little(length, step):
    size = length_bucket(length, step=step)
    assert length <= size
    assert size - length < max(step, 0.25 * length)
    assert length_bucket(size, step=step) == size
    sizes = {
        length_bucket(n, step=step) for n in np.unique(np.geomspace(1, length, 200, dtype=int))
    }
    assert len(sizes) <= 8 + 4 * max(0, np.log2(length / step))


@given(count=st.integers(1, 5000), multiple=st.integers(1, 8))
def test_count_buckets_divide_over_devices(count, multiple):
    size = count_bucket(count, multiple=multiple)
    assert size % multiple == 0
    assert count <= size <= max(multiple, 2 * count)
