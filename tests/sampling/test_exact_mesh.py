"""Fixed sums on meshes: the log-probs of one device, bit for bit."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.compiled import jit
from jaxrl.core.packing import unpack
from jaxrl.core.precision import parse
from jaxrl.models import lora
from jaxrl.models.attention import kernels
from jaxrl.models.model import decoder
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS, by_rows
from tests import tiny
from tests.sampling.test_exact import (
    BOUNDS,
    EVERY,
    a_learner,
    a_model,
    adapted,
    packed,
    rollouts_of,
    sampled,
)

TENSOR = {"fsdp": 2, "tensor": 4}
EVERYWHERE = [(axes, *pair) for pair in EVERY for axes in ({"fsdp": 8}, TENSOR)]
SHORT = {"fp32": "f32", "bf16_master": "bf16", "fp16_master": "f16"}


def on_mesh(axes, model, params, *, rollouts, precision):
    """The learner on a mesh, its parameters and its batch."""
    layout = layout_of(axes)
    attend = kernels.attend_by("auto", layout=layout, config=model.config)
    divided = decoder(model.config, remat="matmuls", layout=layout, attend=attend)
    shape, batch = packed(precision, rollouts, row_length=128, rows=8)
    rows = jax.tree.map(
        lambda x: layout.batch(("batch", "length")) if x.ndim else layout.replicated, batch
    )
    learner = a_learner(divided, precision, shardings_of(layout, model, params))
    return learner, shape, placed_on(axes, model, params), jax.device_put(batch, rows)


def layout_of(axes) -> Layout:
    devices = jax.devices()[: math.prod(axes.values())]
    return Layout(make_mesh(**axes, devices=devices), by_rows(PRESETS["all"]))


def shardings_of(layout, model, params):
    specs = model.specs
    if isinstance(params, lora.Adapted):
        specs = lora.adapter_specs(specs, rank=4, targets=["*_proj"])
        specs = lora.Adapted(specs, model.specs, alpha=8.0)
    return layout.tree(specs)


def placed_on(axes, model, params):
    return jax.device_put(params, shardings_of(layout_of(axes), model, params))


@pytest.mark.parametrize(
    ("axes", "family", "name"),
    [
        *((TENSOR, "qwen3", name) for name in BOUNDS),
        ({"fsdp": 8}, "qwen3", "fp16_master"),
        ({"expert": 2, "context": 2, "tensor": 2}, "qwen3_moe", "bf16_master"),
        *((axes, "qwen3_5_text", "bf16_master") for axes in (TENSOR, {"fsdp": 8})),
    ],
)
def test_scores_on_a_mesh(axes, family, name):
    precision = parse(f"{name},sums=fixed")
    rollouts = rollouts_of(family, precision)
    learner, shape, params, batch = on_mesh(
        axes, *a_model(family), rollouts=rollouts, precision=precision
    )
    score = jit(learner.score, sums="fixed")
    scored = unpack(np.asarray(score(params, batch)), rollouts, shape=shape)
    for found, rollout in zip(scored, rollouts, strict=True):
        np.testing.assert_array_equal(found, rollout.logprobs)
    text = score.lower(params, batch).compile().as_text()
    if "context" not in axes:  # hidden states that lie in parts are looked up as a sum with zeros
        sent = re.findall(r"= (\S+) (?:all-reduce|reduce-scatter)(?:-start)?\(", text)
        assert not [shape for shape in sent if not shape.startswith(("s32", "u32", "pred"))]
    # The CPU may widen an operand for its kernel.
    dots = {re.findall(r"dot\(%(\S+), %(\S+)\)", x)[0] for x in text.splitlines() if " dot(" in x}
    types = dict(re.findall(r"%(\S+) = (\w+)\[", text)) | dict(
        re.findall(r"(\w[\w.]*): (\w+)\[", text)
    )
    assert {types[x] for pair in dots for x in pair} <= {SHORT[name], "f32"}


@pytest.mark.parametrize(
    ("axes", "family", "name"),
    EVERYWHERE
    or [(TENSOR, "deepseek_v3", "bf16_master,latent=absorbed"), (TENSOR, "qwen3_next", "fp32")],
)
def test_other_forms_are_equal_on_a_mesh(axes, family, name):
    """Absorbed latent attention with experts, and the delta rule with experts."""
    precision = parse(f"{name},sums=fixed")
    rollouts = rollouts_of(family, precision)
    learner, shape, params, batch = on_mesh(
        axes, *a_model(family), rollouts=rollouts, precision=precision
    )
    assert not differing(learner, params, batch, rollouts=rollouts, shape=shape)


@pytest.mark.parametrize(
    ("axes", "family", "name"),
    EVERYWHERE
    or [
        (TENSOR, "qwen3", "bf16_master"),
        (TENSOR, "qwen3", "fp32"),
        ({"fsdp": 8}, "qwen3", "fp32"),
    ],
)
def test_adapters_are_equal_on_a_mesh(axes, family, name):
    """A run publishes what the learner's mesh has merged; one device may add in another order."""
    precision, (model, params) = parse(f"{name},sums=fixed"), adapted(family)
    merged = jax.device_put(lora.merge(placed_on(axes, model, params)), jax.devices()[0])
    rollouts = sampled(model, merged, precision)
    learner, shape, placed, batch = on_mesh(
        axes, model, params, rollouts=rollouts, precision=precision
    )
    assert not differing(learner, placed, batch, rollouts=rollouts, shape=shape)


def differing(learner, params, batch, *, rollouts, shape) -> int:
    """Counts tokens whose log-probs are not those that the sampler reported."""
    scores = np.asarray(jit(learner.score, sums="fixed")(params, batch))
    pairs = zip(unpack(scores, rollouts, shape=shape), rollouts, strict=True)
    return sum(int((found != rollout.logprobs).sum()) for found, rollout in pairs)


@pytest.mark.parametrize(
    ("of", "family"), [(a_model, "qwen3"), (a_model, "qwen3_moe"), (adapted, "qwen3")]
)
def test_gradient_on_a_mesh(of, family):
    """A step of plain descent moves the parameters by it."""
    precision = parse("fp32,sums=fixed")
    moved = []
    for axes in ({"data": 1}, TENSOR):
        learner, _, params, batch = on_mesh(
            axes, *of(family), rollouts=rollouts_of(family, precision), precision=precision
        )
        state, _ = jit(learner.step, sums="fixed")(learner.init(params), batch)
        moved.append(tiny.difference(state.params, params))
    one, other = moved
    assert 0 < tiny.norm(tiny.difference(one, other)) < 1e-6 * tiny.norm(one)


def test_a_layout_that_divides_sums_is_refused():
    precision, (model, params) = parse("fp32,sums=fixed"), a_model("qwen3")
    layout = Layout(make_mesh(**TENSOR), PRESETS["all"])
    inputs = [jnp.zeros((8, 128), jnp.int32)] * 3
    with pytest.raises(ValueError, match=r"divides 'vocab' over the mesh's tensor; build it with"):
        decoder(model.config, layout=layout).hidden(params, *inputs, precision=precision)
    with pytest.raises(ValueError, match="the layout divides weights, hence the sums of a token"):
        EmbeddedSampler(model, params, precision=precision, layout=layout)
