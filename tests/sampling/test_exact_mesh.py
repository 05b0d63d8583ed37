"""Fixed sums on meshes: the log-probs of one device, bit for bit."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.core.compiled import jit
from jaxrl.core.packing import unpack
from jaxrl.core.precision import parse
from jaxrl.models.attention import kernels
from jaxrl.models.model import decoder
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS, by_rows
from tests.sampling.test_exact import BOUNDS, a_learner, a_model, packed, rollouts_of

TENSOR = {"fsdp": 2, "tensor": 4}
SHORT = {"fp32": "f32", "bf16_master": "bf16", "fp16_master": "f16"}


def on_mesh(axes, family, precision):
    """The learner on a mesh, its parameters and its batch."""
    model, params = a_model(family)
    devices = jax.devices()[: math.prod(axes.values())]
    layout = Layout(make_mesh(**axes, devices=devices), by_rows(PRESETS["all"]))
    attend = kernels.attend_by("auto", layout=layout, config=model.config)
    divided = decoder(model.config, remat="matmuls", layout=layout, attend=attend)
    shape, batch = packed(precision, rollouts_of(family, precision), row_length=128, rows=8)
    rows = jax.tree.map(
        lambda x: layout.batch(("batch", "length")) if x.ndim else layout.replicated, batch
    )
    shardings = layout.tree(model.specs)
    placed = jax.device_put((params, batch), (shardings, rows))
    return a_learner(divided, precision, shardings), shape, *placed


@pytest.mark.parametrize(
    ("axes", "family", "name"),
    [
        *((TENSOR, "qwen3", name) for name in BOUNDS),
        ({"fsdp": 8}, "qwen3", "fp16_master"),
        ({"expert": 2, "context": 2, "tensor": 2}, "qwen3_moe", "bf16_master"),
    ],
)
def test_scores_on_a_mesh(axes, family, name):
    precision = parse(f"{name},sums=fixed")
    rollouts = rollouts_of(family, precision)
    learner, shape, params, batch = on_mesh(axes, family, precision)
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


def test_gradient_on_a_mesh():
    """A step of plain descent moves the parameters by it."""
    precision = parse("fp32,sums=fixed")
    moved = []
    for axes in ({"data": 1}, TENSOR):
        learner, _, params, batch = on_mesh(axes, "qwen3", precision)
        state, _ = jit(learner.step, sums="fixed")(learner.init(params), batch)
        moved.append(jax.device_get(jax.tree.map(jnp.subtract, state.params, params)))
    one, other = moved
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, one, other))
    assert difference < 1e-6 * optax.tree.norm(one)


def test_a_layout_that_divides_sums_is_refused():
    precision, (model, params) = parse("fp32,sums=fixed"), a_model("qwen3")
    layout = Layout(make_mesh(**TENSOR), PRESETS["all"])
    inputs = [jnp.zeros((8, 128), jnp.int32)] * 3
    with pytest.raises(ValueError, match=r"divides 'vocab' over the mesh's tensor; build it with"):
        decoder(model.config, layout=layout).hidden(params, *inputs, precision=precision)
    with pytest.raises(ValueError, match="the layout divides weights, hence the sums of a token"):
        EmbeddedSampler(model, params, precision=precision, layout=layout)
