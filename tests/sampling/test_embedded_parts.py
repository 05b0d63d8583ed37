"""Stop sequences, buckets, and attention over the KV cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from jaxrl.core.buckets import count_bucket, length_bucket
from jaxrl.core.compiled import jit
from jaxrl.core.precision import PRESETS
from jaxrl.models.model import decoder
from jaxrl.sampling.base import SamplingParams
from jaxrl.sampling.embedded.cache import Cache
from jaxrl.sampling.embedded.kv_cache import decode_step, extend, prefill
from jaxrl.sampling.embedded.stopping import advance, make_stops, no_ending
from tests import tiny


def test_a_completion_ends_at_a_stop_sequence():
    stops = ((2,), (0, 1), (1, 1, 0))
    table = make_stops(SamplingParams(max_tokens=8, stop=stops))
    completions = np.random.default_rng(0).integers(0, 3, (64, 8))
    step, ending = jax.jit(advance), no_ending(64, table)
    for t in range(1, 9):
        ending, ended = step(ending, jnp.asarray(completions[:, t - 1]), table)
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


@pytest.mark.parametrize(("more", "for_cpu"), [(1, True), (30, True), (1, False)])
def test_slots_beyond_the_window_are_skipped(more, for_cpu):
    config = dataclasses.replace(tiny.CONFIG, windows=(5,) * tiny.CONFIG.num_layers)
    config = dataclasses.replace(config, max_positions=1024)
    model, params = decoder(config), tiny.params(config=config)
    settings = {"model": model, "precision": PRESETS["fp32"]}
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, 64, (3, 640)).astype(np.int32)
    lengths = np.array([600, 420, 300], np.int32)
    form = {"record_experts": False, "for_cpu": for_cpu}
    cache, _ = prefill(params, tokens, lengths, **form, **settings)
    hidden = np.arange(640) < lengths[:, None] - 200
    before, after = hidden[:, None, :, None], hidden[:, None, None, :]
    poisoned = Cache(
        jnp.where(after if for_cpu else before, jnp.nan, cache.keys),
        jnp.where(before, jnp.nan, cache.values),
        for_cpu=for_cpu,
    )
    following = rng.integers(2, 64, (3, 64)).astype(np.int32)
    if more == 1:
        step = jit(functools.partial(decode_step, **settings))
        _, found = step(params, poisoned, following[:, 0], positions=lengths)
    else:
        counts = np.full(3, more, np.int32)
        _, found = extend(params, poisoned, following, starts=lengths, lengths=counts, **settings)
    for row, length in enumerate(lengths):
        whole = np.concatenate([tokens[row, :length], following[row, :more]])[None]
        count = np.array([len(whole[0])], np.int32)
        _, expected = prefill(params, whole, count, record_experts=False, **settings)
        np.testing.assert_allclose(found[row], expected[0], atol=1e-5)
