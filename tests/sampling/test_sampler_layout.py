"""The embedded sampler's mesh beside a learner that cuts what products sum over."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.builders.layout import sampler_layout
from jaxrl.config.sampler import SamplerConfig
from jaxrl.core.precision import PRESETS
from jaxrl.models import spec
from jaxrl.models.model import decoder
from jaxrl.sampling.base import SamplingParams
from jaxrl.sampling.embedded.kv_cache import prefill
from jaxrl.sampling.embedded.program import decode_program
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS as RULES, change
from jaxrl.sharding.traffic import collectives
from jaxrl.sharding.transfer import placed
from tests import tiny

F32 = PRESETS["fp32"]
PROMPTS = [np.arange(2, 2 + n, dtype=np.int32) * 7 % 62 for n in (3, 9)]
GREEDY = SamplingParams(max_tokens=20, temperature=0, stop=())


def shapes(model, layout):
    return placed(spec.abstract(model.specs, dtype=F32.params), layout.tree(model.specs))


def program_of(model, layout, *, slots=64):
    return decode_program(
        model._replace(local=layout.local),
        shapes(model, layout),
        rows=8,
        slots=slots,
        sampling=GREEDY,
        precision=F32,
        layout=layout,
    )


def sent_per_token(model, layout):
    program = program_of(model, layout)
    text = program.lowered.compile().as_text() or ""
    found = collectives(text, trips=[program.tokens])
    return sum(traffic.sent for traffic in found.values()) / program.tokens


@pytest.mark.parametrize(
    ("config", "sizes", "axes"),
    [
        (tiny.CONFIG, {"data": 4, "tensor": 2}, {"fsdp": 8}),
        (tiny.MOE, {"expert": 4, "tensor": 2}, {"fsdp": 4, "expert": 2}),
    ],
)
def test_no_mesh_gathers_weights_for_a_token(config, sizes, axes):
    model, params = decoder(config), tiny.params(config=config)
    layout = Layout(make_mesh(**axes), RULES["all"])
    own = sampler_layout(SamplerConfig(), layout, model)
    assert {axis: n for axis, n in own.mesh.shape.items() if n > 1} == sizes
    assert sent_per_token(model, own) < 0.2 * sent_per_token(model, layout)
    cut = jax.device_put(params, layout.tree(model.specs))
    sampler = EmbeddedSampler(model._replace(local=own.local), cut, precision=F32, layout=own)
    alone = EmbeddedSampler(model, params, precision=F32)
    for one, other in zip(
        *(
            sorted(s.sample(PROMPTS, GREEDY, group_size=4), key=lambda c: c[:2])
            for s in (sampler, alone)
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_weights_cut_by_a_rule_of_ones_own_are_not_gathered_for_a_token():
    model = decoder(tiny.CONFIG)
    rules = change(RULES["all"], parameters=["embed=", "mlp=fsdp"], activations=[])
    layout = Layout(make_mesh(fsdp=8), rules)
    own = sampler_layout(SamplerConfig(), layout, model)
    assert own.mesh.shape["tensor"] == 2
    assert sent_per_token(model, own) < 0.5 * sent_per_token(model, layout)


def test_a_mesh_without_cut_sums_is_the_samplers():
    layout = Layout(make_mesh(data=4, tensor=2), RULES["all"])
    assert sampler_layout(SamplerConfig(), layout, tiny.model()) is layout
    whole = sampler_layout(SamplerConfig(tensor=1), layout, tiny.model())
    assert dict(whole.mesh.shape) == {**dict.fromkeys(whole.mesh.shape, 1), "data": 8}
    assert [*whole.mesh.devices.flat] == [*layout.mesh.devices.flat]
    assert sampler_layout(SamplerConfig(), layout, tiny.model(), sums="fixed") == whole


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"data": 2, "tensor": 2}])
def test_the_planned_cache_lies_as_a_prefill_leaves_it(sizes):
    devices = jax.devices()[: math.prod(sizes.values())]
    layout = Layout(make_mesh(**sizes, devices=devices), RULES["all"])
    model = tiny.model()._replace(local=layout.local)
    of_rows = (jnp.ones((8, 16), jnp.int32), jnp.full(8, 9, jnp.int32))
    tokens, lengths = jax.device_put(of_rows, layout.batch(("batch",)))
    filled = prefill.lower(
        shapes(model, layout),
        tokens,
        lengths,
        model=model,
        precision=F32,
        record_experts=False,
        for_cpu=False,
    )
    found, _ = filled.compile().output_shardings
    (_, planned), _ = program_of(model, layout, slots=16).lowered.compile().input_shardings
    for one, other in ((found.keys, planned.cache.keys), (found.values, planned.cache.values)):
        assert one.is_equivalent_to(other, 5), (one.spec, other.spec)
