"""Experts, sinks and linear layers on a mesh give the completions of one device."""

import jax
import numpy as np
import pytest

from jaxrl.core.precision import PRESETS
from jaxrl.models.model import decoder
from jaxrl.sampling.base import SamplingParams
from jaxrl.sampling.embedded import sampler as sampler_module
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS as RULES
from tests import tiny

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, seed=0)
PROMPTS = [np.arange(2, 2 + n, dtype=np.int32) for n in (3, 9, 5)]


def sampled(config, layout=None):
    model, params = decoder(config), tiny.params(config=config)
    if layout is not None:
        model = decoder(config, layout=layout)
        params = jax.device_put(params, layout.tree(model.specs))
    sampler = EmbeddedSampler(
        model, params, precision=PRESETS["fp32"], layout=layout, record_experts=True
    )
    found = sampler.sample(PROMPTS, GREEDY, group_size=3)
    return sorted(found, key=lambda one: (one.prompt_index, one.sample_index))


@pytest.mark.parametrize(
    ("config", "unstacked"),
    [(tiny.MOE, False), (tiny.GPT_OSS, True), (tiny.NEXT, False)],
    ids=["moe", "gpt_oss, as on GPUs", "next"],
)
def test_mesh_equals_one_device(monkeypatch, config, unstacked):
    layout = Layout(make_mesh(fsdp=4, tensor=2), RULES["fsdp_tensor"])
    alone = sampled(config)
    monkeypatch.setattr(sampler_module, "wants_unstacked", lambda *_: unstacked)
    for one, other in zip(alone, sampled(config, layout), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.experts, other.experts)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
