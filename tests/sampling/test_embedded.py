"""The embedded sampler against the learner's forward pass and its own guarantees."""

import dataclasses
import math
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.core.casts import as_served, cast
from jaxrl.core.precision import PRESETS, parse, sampler_precision
from jaxrl.models.logprobs import token_logprobs
from jaxrl.models.model import decoder
from jaxrl.sampling.base import SamplingParams, Turn
from jaxrl.sampling.embedded import decode_steps
from jaxrl.sampling.embedded.cache import Cache
from jaxrl.sampling.embedded.one_at_a_time import OneAtATime
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from jaxrl.sampling.embedded.stopping import Ending
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS as RULES
from jaxrl.sharding.traffic import collectives
from tests import tiny

MODEL, PARAMS, F32 = tiny.model(), tiny.params(), PRESETS["fp32"]
PROMPTS = [np.arange(2, 2 + n, dtype=np.int32) * 7 % 62 for n in (3, 9, 14)]
SAMPLED = SamplingParams(max_tokens=100, temperature=0.8, stop=((1,), (5, 6)), seed=3)
GREEDY = SamplingParams(max_tokens=100, temperature=0, stop=((1,), (5, 6)))


@pytest.fixture(scope="module")
def sampler():
    return EmbeddedSampler(MODEL, PARAMS, precision=F32, version=4)


def _sample(sampler, params=SAMPLED, prompts=PROMPTS, group_size=4):
    completions = list(sampler.sample(prompts, params, group_size=group_size))
    by_index = {(c.prompt_index, c.sample_index): c for c in completions}
    assert len(by_index) == len(completions) == len(prompts) * group_size
    return by_index


def _same_tokens(one, other):
    return all(np.array_equal(one[k].tokens, other[k].tokens) for k in one.keys() | other.keys())


def _learner_logprobs(completion, *, precision, temperature, params=PARAMS):
    """Scores the whole sequence in one padded row with the learner."""
    prompt = PROMPTS[completion.prompt_index]
    ids = np.concatenate([prompt, completion.tokens])
    tokens, segments = np.zeros((2, 1, 128), np.int32)
    tokens[0, : len(ids)], segments[0, : len(ids)] = ids, 1
    scores = _score(params, tokens, segments, precision, temperature)
    return scores[0, len(prompt) : len(ids)]


def _score(params, tokens, segments, precision, temperature):
    @jax.jit
    def run(params, tokens, segments):
        params = cast(params, precision.compute)
        positions = jnp.arange(tokens.shape[1])[None]
        hidden = MODEL.hidden(params, tokens, positions, segments, precision=precision)
        head = MODEL._replace(temperature=temperature).head(params)
        return token_logprobs(hidden, head, tokens, segments > 0, precision=precision)

    return run(params, tokens, segments)


def test_logprobs_are_the_learners(sampler):
    completions = _sample(sampler)
    assert {c.finish_reason for c in completions.values()} == {"stop", "length"}
    for key in [(0, 0), (1, 2), (2, 3)]:
        one = completions[key]
        expected = _learner_logprobs(one, precision=F32, temperature=0.8)
        np.testing.assert_allclose(one.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("text", ["bf16_master", "fp16_master"])
def test_half_precision_logprobs_equal_the_shadow(text):
    precision = parse(text)
    sampler = EmbeddedSampler(MODEL, PARAMS, precision=precision)
    one = _sample(sampler)[2, 3]
    expected = _learner_logprobs(one, precision=sampler_precision(precision), temperature=0.8)
    # Softmax and sums associate differently, which can flip the rounding of an activation.
    tolerance = 16 * float(jnp.finfo(precision.sampler).eps)
    np.testing.assert_allclose(one.logprobs, expected, atol=tolerance)


def test_eight_bit_weights_use_the_samplers_dtype():
    precision = parse("bf16_master,wire=f8_e4m3")
    rounded = cast(cast(PARAMS, precision.wire), precision.sampler)
    coarse = _sample(EmbeddedSampler(MODEL, PARAMS, precision=precision))
    assert _same_tokens(
        coarse, _sample(EmbeddedSampler(MODEL, rounded, precision=parse("bf16_master")))
    )
    fine = _sample(EmbeddedSampler(MODEL, PARAMS, precision=parse("bf16_master")))
    assert not _same_tokens(coarse, fine)


def test_completion_depends_on_own_prompt_and_seed(sampler):
    completions = _sample(sampler)
    small = EmbeddedSampler(MODEL, PARAMS, precision=F32, max_batch=8)
    assert _same_tokens(completions, _sample(small))
    fewer = _sample(sampler, prompts=PROMPTS[:2])
    assert _same_tokens(fewer, {k: completions[k] for k in fewer})
    other = _sample(sampler, params=dataclasses.replace(SAMPLED, seed=4))
    assert not _same_tokens(completions, other)


def test_repetition_is_exact_in_values_and_order(sampler):
    one, two = (list(sampler.sample(PROMPTS, SAMPLED, group_size=4)) for _ in range(2))
    for a, b in zip(one, two, strict=True):
        assert a[:2] == b[:2]
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_samplers_of_equal_models_share_their_programs(sampler):
    expected = _sample(sampler)
    traced = []

    def count(event, seconds, **about):
        if event.endswith("jaxpr_trace_duration"):
            traced.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(count)
    other = EmbeddedSampler(decoder(dataclasses.replace(tiny.CONFIG)), PARAMS, precision=F32)
    found = _sample(other)
    jax.monitoring.unregister_event_duration_listener(count)
    assert not {name for name in traced if name in ("prefill", "decode_segment")}
    assert _same_tokens(found, expected)


def test_completions_arrive_in_finishing_order(sampler):
    """With growing caches and a shrinking batch."""
    completions = list(sampler.sample(PROMPTS, SAMPLED, group_size=11))
    by_index = {(c.prompt_index, c.sample_index): c for c in completions}
    fewer = _sample(sampler)
    assert _same_tokens(fewer, {k: by_index[k] for k in fewer})
    lengths = [len(c.tokens) for c in completions]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1] == 100
    for one in completions:
        stopped = one.tokens[-1] == 1 or tuple(one.tokens[-2:]) == (5, 6)
        assert one.finish_reason == ("stop" if stopped else "length")
        assert 1 not in one.tokens[:-1]
        assert stopped or len(one.tokens) == 100
        assert one.tokens.dtype == np.int32
        assert one.logprobs.dtype == np.float32
        np.testing.assert_array_equal(one.versions, 4)


@pytest.fixture(scope="module")
def greedy(sampler):
    return _sample(sampler, GREEDY)


def test_greedy_completions_have_logprobs_at_temperature_one(greedy):
    for key in [(0, 0), (2, 1)]:
        expected = _learner_logprobs(greedy[key], precision=F32, temperature=1.0)
        np.testing.assert_allclose(greedy[key].logprobs, expected, atol=1e-5)


def test_loaded_weights_serve_the_next_request():
    sampler = EmbeddedSampler(MODEL, PARAMS, precision=F32)
    before = _sample(sampler)
    running = sampler.sample(PROMPTS, SAMPLED, group_size=4)
    other = tiny.params(1)
    sampler.load(other, version=7)
    jax.tree.map(lambda x: x.delete(), other)  # as a learner that donates its state
    assert sampler.version == 7
    during = {(c.prompt_index, c.sample_index): c for c in running}
    assert _same_tokens(before, during)
    assert {int(v) for c in during.values() for v in c.versions} == {0}
    after = _sample(sampler)
    assert not _same_tokens(before, after)
    assert {int(v) for c in after.values() for v in c.versions} == {7}


def test_weights_are_rounded_to_the_wire_dtype():
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), PARAMS)
    one = EmbeddedSampler(MODEL, PARAMS, precision=parse("fp32,wire=bf16"))
    other = EmbeddedSampler(MODEL, rounded, precision=F32)
    for a, b in zip(_sample(one).values(), _sample(other).values(), strict=True):
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


@pytest.mark.parametrize(
    ("rules", "axes"), [("data", {"data": 8}), ("fsdp_tensor", {"data": 2, "fsdp": 2, "tensor": 2})]
)
def test_mesh_equals_one_device(greedy, rules, axes):
    layout = Layout(make_mesh(**axes), RULES[rules])
    params = jax.device_put(PARAMS, layout.tree(MODEL.specs))
    sharded = _sample(EmbeddedSampler(MODEL, params, precision=F32, layout=layout), GREEDY)
    assert _same_tokens(greedy, sharded)
    for key in greedy:
        np.testing.assert_allclose(greedy[key].logprobs, sharded[key].logprobs, atol=1e-5)


def test_own_devices_serve_the_learners_weights(greedy):
    """Bit for bit, whatever the learner's layout, and to two threads at once."""
    learners, own = jax.devices()[:4], jax.devices()[4:6]
    fsdp = Layout(make_mesh(fsdp=4, devices=learners), RULES["fsdp"])
    params = jax.device_put(PARAMS, fsdp.tree(MODEL.specs))
    layout = Layout(make_mesh(data=2, devices=own), RULES["data"])
    precision = parse("fp32,wire=bf16")
    rounded = EmbeddedSampler(MODEL, params, precision=precision, layout=layout)
    served = jax.tree.leaves(rounded._weights.params)
    for mine, sent in zip(served, jax.tree.leaves(as_served(PARAMS, precision)), strict=True):
        assert mine.devices() == set(own)
        for part in mine.addressable_shards:  # `data` keeps whole weights on each device
            np.testing.assert_array_equal(part.data, sent, strict=True)
    whole = EmbeddedSampler(MODEL, params, precision=F32, layout=layout)
    sampler = OneAtATime(whole, own[0])
    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(lambda _: _sample(sampler, GREEDY), range(2)):
            assert _same_tokens(greedy, found)


def test_moving_a_batch_copies_shards_only():
    layout = Layout(make_mesh(fsdp=8), RULES["fsdp"])
    layers, batch, slots = 16, 16, 64

    def part(shape, dtype, *spec):
        sharding = NamedSharding(layout.mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    heads = (layers, batch, 2)
    cache = Cache(
        keys=part((*heads, 8, slots), jnp.uint16, None, "fsdp"),
        values=part((*heads, slots, 8), jnp.uint16, None, "fsdp"),
    )
    each = part((batch,), jnp.int32, "fsdp")
    rows = decode_steps.RowStates(
        token=each,
        context=each,
        key=part((batch,), jax.random.key(0).dtype, "fsdp"),
        ending=Ending(part((batch, 1), jnp.int32, "fsdp"), each),
        length=each,
        limit=each,
        stopped=part((batch,), jnp.bool_, "fsdp"),
    )
    state = decode_steps.DecodeState(cache, rows)
    found = decode_steps.take_rows.lower(state, each, rows.stopped, slots=2 * slots).compile()
    moved = 2 * 2 * math.prod(heads) * 8 * 2 * slots  # bytes of the new cache
    assert found.memory_analysis().temp_size_in_bytes < moved / 4
    grown = decode_steps.grow_cache.lower(state, slots=2 * slots).compile()
    assert collectives(grown.as_text() or "") == {}


def test_resharding_traffic_is_known():
    mesh = make_mesh(fsdp=4, tensor=2)
    params = jax.device_put(PARAMS, Layout(mesh, RULES["fsdp_tensor"]).tree(MODEL.specs))
    own = Layout(mesh, RULES["data"])
    sampler = EmbeddedSampler(MODEL, params, precision=F32, layout=own)
    moved = collectives(sampler.transfer_hlo(params))
    # A device has an eighth of each matrix and gets the rest; norms are whole everywhere.
    cut = [x for x in jax.tree.leaves(params) if not x.is_fully_replicated]
    assert moved.keys() == {"all-gather"}
    assert sum(x.nbytes for x in cut) * 7 / 8 == moved["all-gather"].sent
    same = EmbeddedSampler(MODEL, params, precision=F32, layout=Layout(mesh, RULES["fsdp_tensor"]))
    assert collectives(same.transfer_hlo(params)) == {}


def test_weights_that_are_not_finite_are_reported():
    broken = {**PARAMS, "final_norm": PARAMS["final_norm"] * np.nan}
    sampler = EmbeddedSampler(MODEL, broken, precision=F32, version=3)
    with pytest.raises(FloatingPointError, match="version 3"):
        _sample(sampler)


@pytest.mark.parametrize(
    ("prompts", "group_size", "message"),
    [
        ([PROMPTS[0], np.array([], np.int32)], 1, "prompt 1 .*shape"),
        ([np.ones(29, np.int32)], 1, "29 tokens.*128 positions"),
        ([np.array([3, 64])], 1, "0 to 63"),
        ([np.array([0.5])], 1, "float64"),
        (PROMPTS, 0, "group_size=0"),
    ],
)
def test_invalid_requests_are_refused_at_the_call(sampler, prompts, group_size, message):
    with pytest.raises(ValueError, match=message):
        sampler.sample(prompts, SAMPLED, group_size=group_size)


def test_turn_depends_on_own_index_and_limit(sampler):
    """A lower limit truncates the same completion, whatever else is sampled with it."""
    whole = _sample(sampler)
    limits = {(0, 1): 100, (1, 0): 7, (1, 3): len(whole[1, 3].tokens), (2, 2): 1}
    turns = [Turn(PROMPTS[i], i, j, limit) for (i, j), limit in limits.items()]
    found = {(c.prompt_index, c.sample_index): c for c in sampler.sample_turns(turns, SAMPLED)}
    assert found.keys() == limits.keys()
    for index, limit in limits.items():
        one, other = found[index], whole[index]
        np.testing.assert_array_equal(one.tokens, other.tokens[:limit])
        np.testing.assert_allclose(one.logprobs, other.logprobs[:limit], atol=1e-5)
        truncated = len(other.tokens) > limit
        assert one.finish_reason == ("length" if truncated else other.finish_reason)
    with pytest.raises(ValueError, match="max_tokens=0"):
        sampler.sample_turns([Turn(PROMPTS[0], 0, 0, 0)], SAMPLED)
