"""The cache in the form for TPUs and GPUs, and the weights in that for GPUs, on a CPU."""

import dataclasses

import numpy as np
import pytest

from jaxrl.core.precision import parse
from jaxrl.models.model import decoder
from jaxrl.sampling.base import SamplingParams, Turn, TurnCache
from jaxrl.sampling.embedded import sampler as sampler_module
from jaxrl.sampling.embedded.request import DecodeRequest
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from tests import tiny


def completions(monkeypatch, platform, *, config, precision):
    monkeypatch.setattr(DecodeRequest, "on_cpu", platform == "cpu")
    monkeypatch.setattr(sampler_module, "wants_unstacked", lambda *_: platform == "gpu")
    params = tiny.params(config=config)
    sampler = EmbeddedSampler(
        decoder(config), params, precision=parse(precision), max_batch=16, record_experts=True
    )
    asked = SamplingParams(max_tokens=100, stop=((2,),), seed=1)
    # More than fit into a batch, so that rows are refilled; the cache grows and loses rows.
    prompts = [np.arange(3, 3 + n, dtype=np.int32) for n in (2, 5, 9, 20)]
    found = list(sampler.sample(prompts, asked, group_size=6))
    cache, context = TurnCache(), prompts[3]
    for turn in range(2):
        one = Turn(context, 4, turn, 40, cache=cache)
        found += list(sampler.sample_turns([one], asked))
        context = np.concatenate([context, found[-1].tokens, prompts[0]])
    return sorted(found, key=lambda c: (c.prompt_index, c.sample_index, len(c.tokens)))


@pytest.mark.parametrize(
    ("config", "precision", "platform"),
    [
        (tiny.MOE, "fp32", "gpu"),
        (tiny.MOE, "bf16", "tpu"),
        (dataclasses.replace(tiny.DEEPSEEK, max_positions=256), "fp32,latent=sampler", "tpu"),
    ],
    ids=["f32", "bf16", "narrow"],
)
def test_forms_give_the_same_completions(monkeypatch, config, precision, platform):
    settings = {"config": config, "precision": precision}
    one = completions(monkeypatch, "cpu", **settings)
    other = completions(monkeypatch, platform, **settings)
    assert len(one) == 26
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.experts, b.experts)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
