"""The next turn of an episode computes only what follows the turn before."""

import dataclasses
import gc
import weakref

import jax
import numpy as np
import pytest

from jaxrl.core.precision import PRESETS, parse
from jaxrl.data.prompts import Example
from jaxrl.environments.episodes.base import EpisodeLimits, Step
from jaxrl.environments.episodes.runner import EpisodeRunner, LockstepScheduler
from jaxrl.models.model import decoder
from jaxrl.sampling.base import SamplingParams, Turn, TurnCache
from jaxrl.sampling.embedded import first_tokens
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS as RULES
from tests import tiny

PARAMS = SamplingParams(max_tokens=1, temperature=0.8, stop=((1,), (5, 6)), seed=3)
EPISODES = 12


@pytest.fixture
def computed(monkeypatch):
    """Counts the context tokens that a request runs through the decoder."""
    counts = {"whole": 0, "rest": 0}
    prefill, extend = first_tokens.prefill, first_tokens.extend

    def whole(weights, tokens, lengths, **settings):
        counts["whole"] += int(lengths[lengths > 1].sum())
        return prefill(weights, tokens, lengths, **settings)

    def rest(weights, cache, tokens, *, starts, lengths, **settings):
        counts["rest"] += int(lengths[starts > 0].sum())
        return extend(weights, cache, tokens, starts=starts, lengths=lengths, **settings)

    monkeypatch.setattr(first_tokens, "prefill", whole)
    monkeypatch.setattr(first_tokens, "extend", rest)
    return counts


def _sampler(config=tiny.CONFIG, *, precision=PRESETS["fp32"], layout=None, **settings):
    config = dataclasses.replace(config, max_positions=1024)
    model, params = decoder(config), tiny.params(config=config)
    if layout is not None:
        params = jax.device_put(params, layout.tree(model.specs))
    return EmbeddedSampler(model, params, precision=precision, layout=layout, **settings)


def _played(sampler, *, caches, turns=2, episodes=EPISODES, longest=30, between=None):
    """Plays episodes whose environments say up to 35 random tokens."""
    rng = np.random.default_rng(0)
    contexts = [rng.integers(2, 64, rng.integers(40, 49)).astype(np.int32) for _ in range(episodes)]
    kept = [TurnCache() if caches else None for _ in contexts]
    found = []
    for _ in range(turns):
        limits = rng.integers(1, longest, episodes)
        observations = [rng.integers(2, 64, rng.integers(0, 36)) for _ in contexts]
        asked = [
            Turn(context, i, 0, int(limit), None, cache)
            for i, (context, limit, cache) in enumerate(zip(contexts, limits, kept, strict=True))
        ]
        said = sorted(sampler.sample_turns(asked, PARAMS), key=lambda c: c.prompt_index)
        found += said
        if between is not None:
            between(sampler)
        contexts = [
            np.concatenate([context, c.tokens, observation]).astype(np.int32)
            for context, c, observation in zip(contexts, said, observations, strict=True)
        ]
    return found


def _assert_equal(found, expected, *, atol=1e-5):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=atol)
        if one.experts is not None or other.experts is not None:
            np.testing.assert_array_equal(one.experts, other.experts, strict=True)


@pytest.mark.parametrize(
    "config", [tiny.CONFIG, tiny.MOE, tiny.GEMMA, tiny.GPT_OSS], ids=lambda c: c.model_type
)
def test_only_what_is_new_is_computed(config, computed):
    experts, turns = config.experts is not None, 3 if config is tiny.CONFIG else 2
    expected = _played(_sampler(config, record_experts=experts), caches=False, turns=turns)
    assert computed["rest"] == 0
    whole, computed["whole"] = computed["whole"], 0
    found = _played(_sampler(config, record_experts=experts), caches=True, turns=turns)
    _assert_equal(found, expected)
    # The contexts of the first turns; later, an observation and the token before it.
    assert computed["whole"] < EPISODES * 49 < whole / 2
    assert computed["rest"] < (turns - 1) * EPISODES * 36


@pytest.mark.parametrize(
    ("config", "name"),
    [
        *((tiny.CONFIG, "fp32"), (tiny.CONFIG, "bf16_master")),
        *((one, "fp16_master") for one in (tiny.GPT_OSS, tiny.GEMMA)),
    ],
    ids=lambda x: getattr(x, "model_type", x),
)
def test_fixed_sums_with_kept_beginning(config, name, computed):
    precision = parse(f"{name},sums=fixed")
    expected = _played(_sampler(config, precision=precision), caches=False)
    found = _played(_sampler(config, precision=precision), caches=True)
    _assert_equal(found, expected, atol=0)
    assert computed["rest"] > 0


def test_waiting_turns_reuse_kept_rows(computed):
    settings = {"episodes": 40, "longest": 80}
    expected = _played(_sampler(max_batch=40), caches=False, **settings)
    whole, computed["whole"] = computed["whole"], 0
    _assert_equal(_played(_sampler(max_batch=40), caches=True, **settings), expected)
    assert computed["whole"] < 40 * 49  # rows of a batch that became smaller are kept, too
    computed["whole"] = 0
    _assert_equal(_played(_sampler(max_batch=8), caches=True, **settings), expected)
    assert 40 * 49 < computed["whole"] < whole  # rows that other completions took are gone


@pytest.mark.parametrize(
    ("rules", "axes"), [("data", {"data": 8}), ("fsdp_tensor", {"data": 2, "fsdp": 2, "tensor": 2})]
)
def test_mesh_equals_one_device(rules, axes, computed):
    expected = _played(_sampler(), caches=False)
    layout = Layout(make_mesh(**axes), RULES[rules])
    _assert_equal(_played(_sampler(layout=layout), caches=True), expected)
    assert computed["rest"] > 0


def test_other_weights_begin_anew(computed):
    def load(sampler):
        sampler.load(tiny.params(seed=1), version=1)

    expected = _played(_sampler(), caches=False, between=load)
    _assert_equal(_played(_sampler(), caches=True, between=load), expected)
    assert computed["rest"] == 0


def test_states_of_linear_layers_are_computed_anew(computed):
    expected = _played(_sampler(tiny.NEXT), caches=False)
    _assert_equal(_played(_sampler(tiny.NEXT), caches=True), expected, atol=0)
    assert computed["rest"] == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda tokens: tokens[1:],  # another sequence
        lambda tokens: np.concatenate([tokens, tokens, tokens[:60]]),  # most of it is new
        lambda tokens: tokens[:-1],  # nothing is new
    ],
)
def test_changed_context_is_recomputed(change, computed):
    sampler, cache = _sampler(), TurnCache()
    context = np.random.default_rng(0).integers(2, 64, 40).astype(np.int32)
    (said,) = sampler.sample_turns([Turn(context, 0, 0, 20, None, cache)], PARAMS)
    following = change(np.concatenate([context, said.tokens])[:-1])
    (found,) = sampler.sample_turns([Turn(following, 0, 0, 20, None, cache)], PARAMS)
    assert computed["rest"] == 0
    (expected,) = _sampler().sample_turns([Turn(following, 0, 0, 20)], PARAMS)
    _assert_equal([found], [expected])


def test_rows_are_kept_while_episodes_run():
    gc.freeze()  # collects what this test makes, and nothing of the tests before
    sampler, caches = _sampler(max_batch=4), [TurnCache() for _ in range(12)]
    context = np.arange(2, 12, dtype=np.int32)
    # Short completions: three batches, one after another.
    asked = [Turn(context, i, 0, 2, None, cache) for i, cache in enumerate(caches)]
    list(sampler.sample_turns(asked, PARAMS))
    kept = [cache.content is not None for cache in caches]
    assert sum(kept) == 8
    alive = weakref.ref(caches[kept.index(True)].content.cache.keys)
    del asked, caches
    gc.collect()
    assert alive() is None


def test_caches_are_freed_when_taken():
    gc.freeze()  # as above
    sampler, caches = _sampler(max_batch=4), [TurnCache() for _ in range(8)]
    rng = np.random.default_rng(0)
    contexts = [rng.integers(2, 64, 20).astype(np.int32) for _ in caches]

    def turns():
        return [
            Turn(c, i, 0, 2, None, cache)
            for i, (c, cache) in enumerate(zip(contexts, caches, strict=True))
        ]

    for completion in sampler.sample_turns(turns(), PARAMS):
        # Lengths alternate between the rows of the two batches.
        i = completion.prompt_index
        more = rng.integers(2, 64, 1 + i % 4)
        contexts[i] = np.concatenate([contexts[i], completion.tokens, more]).astype(np.int32)
    kept = {id(cache.content.cache): cache.content.cache.keys for cache in caches}
    alive = [weakref.ref(keys) for keys in kept.values()]
    assert len(alive) == 2
    del kept
    following = sampler.sample_turns(turns(), PARAMS)
    next(following)  # the first of two batches has ended
    gc.collect()
    assert sum(keys() is not None for keys in alive) == 1


def test_rounded_batch_is_kept(computed):
    layout = Layout(make_mesh(data=8), RULES["data"])
    _played(_sampler(layout=layout, max_batch=3), caches=True, turns=2, episodes=3)
    assert computed["rest"] > 0


class Talk:
    """An episode of three turns."""

    async def reset(self, example):
        self.turns = 0
        return example.tokens

    async def step(self, completion):
        self.turns += 1
        return Step([40, 41], 0.0, self.turns == 3)


def test_episodes_compute_new_tokens_only(computed):
    limits = EpisodeLimits(
        max_turns=4, max_tokens=60, max_prompt_tokens=20, timeout=600.0, vocab_size=64
    )
    examples = {n: Example(np.arange(2, 14 + n, dtype=np.int32), None, {}) for n in range(3)}
    found, failure = EpisodeRunner(Talk, limits, LockstepScheduler).run(
        examples, sampler=_sampler(), params=PARAMS, group_size=2
    )
    assert failure is None
    # An observation, and the token before it.
    assert computed["rest"] == 3 * sum(len(r.episode.turns) - 1 for r in found) > 0
    assert computed["whole"] == sum(len(example.tokens) for example in examples.values())
