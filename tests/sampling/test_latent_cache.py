"""A cache of the narrow projection gives the completions of one with the keys of all heads."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.core.precision import parse, sampler_precision
from jaxrl.models import lora
from jaxrl.models.model import decoder
from jaxrl.sampling.base import SamplingParams, Turn, TurnCache
from jaxrl.sampling.embedded.kv_cache import prefill
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS as RULES
from tests import tiny
from tests.models.test_latent import DIRECT, adapted

PARAMS = SamplingParams(max_tokens=24, temperature=0.8, stop=((1,), (5, 6)), seed=3)
NARROW = parse("fp32,latent=sampler")


def a_sampler(form, *, config=tiny.DEEPSEEK, params=None, layout=None, **settings):
    config = dataclasses.replace(config, max_positions=1024)
    model, params = decoder(config), tiny.params(config=config) if params is None else params
    if layout is not None:
        model = model._replace(local=layout.local)
        params = jax.device_put(params, layout.tree(model.specs))
    settings = {"record_experts": True, "max_batch": 8, "layout": layout} | settings
    return EmbeddedSampler(model, params, precision=form, **settings)


def completions(sampler):
    """Of 24 turns, most of which wait for rows of others; then of turns that continue them."""
    rng, found = np.random.default_rng(0), []
    contexts = [rng.integers(2, 64, rng.integers(40, 49)).astype(np.int32) for _ in range(24)]
    caches = [TurnCache() for _ in contexts]
    for _ in range(2):
        limits = rng.integers(1, 24, len(contexts))
        turns = [
            Turn(context, i, 0, int(limit), None, cache)
            for i, (context, limit, cache) in enumerate(zip(contexts, limits, caches, strict=True))
        ]
        assert all(cache.content is None for cache in caches) == (not found)
        said = sorted(sampler.sample_turns(turns, PARAMS), key=lambda c: c.prompt_index)
        more = rng.integers(2, 64, (len(contexts), 20))
        contexts = [
            np.concatenate([context, one.tokens, observation]).astype(np.int32)
            for context, one, observation in zip(contexts, said, more, strict=True)
        ]
        found += said
    return found


def assert_equal(found, expected):
    assert any(
        np.any(one.logprobs != other.logprobs) for one, other in zip(found, expected, strict=True)
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.experts, other.experts)
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("config", [tiny.DEEPSEEK, DIRECT], ids=["narrow_q", "direct_q"])
def test_latent_rows_equal_expanded_rows(config):
    params = lora.merge(adapted(decoder(config), tiny.params(config=config)))
    forms = parse("fp32"), NARROW
    expected, found = (completions(a_sampler(form, config=config, params=params)) for form in forms)
    assert_equal(found, expected)


@pytest.mark.parametrize("cut", [{"fsdp": 4, "tensor": 2}, {"tensor": 4}], ids=str)
def test_mesh_equals_one_device(cut):
    layout = Layout(
        make_mesh(devices=jax.devices()[: np.prod(list(cut.values()))], **cut), RULES["fsdp_tensor"]
    )
    assert_equal(completions(a_sampler(NARROW, layout=layout)), completions(a_sampler(NARROW)))


@pytest.mark.parametrize("name", ["fp32", "bf16_master"])
def test_the_cache_holds_the_narrow_projection_alone(name):
    precision = sampler_precision(parse(f"{name},latent=sampler"))
    params = jax.tree.map(lambda x: x.astype(precision.compute), tiny.params(config=tiny.DEEPSEEK))
    cache, _ = prefill(
        params,
        np.full((3, 16), 2, np.int32),
        np.full(3, 16, np.int32),
        model=decoder(tiny.DEEPSEEK),
        precision=precision,
        record_experts=False,
    )
    latent = tiny.DEEPSEEK.latent
    numbers = tiny.DEEPSEEK.num_layers * 3 * 16 * (latent.kv_rank + latent.rope_dim)
    assert sum(x.nbytes for x in jax.tree.leaves(cache)) == numbers * precision.compute.itemsize
