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
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS, by_rows
from tests.sampling.test_exact import BOUNDS, a_learner, a_model, packed, rollouts_of

FSDP, TENSOR = {"fsdp": 8}, {"fsdp": 2, "tensor": 4}
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
        *((axes, "qwen3", name) for axes in (FSDP, TENSOR) for name in BOUNDS),
        ({"fsdp": 2, "context": 2, "tensor": 2}, "qwen3", "bf16_master"),
        ({"expert": 4, "tensor": 2}, "qwen3_moe", "bf16_master"),
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
    from pathlib import Path

    Path(f"/tmp/exact-{'_'.join(axes)}-{name}.hlo").write_text(text)
    sent = re.findall(r"= (\S+) (?:all-reduce|reduce-scatter)(?:-start)?\(", text)
    assert not [shape for shape in sent if not shape.startswith(("s32", "pred", "u32"))], sent


def test_a_sampler_on_a_mesh():
    pass


def test_gradient_on_a_mesh():
    precision = parse("fp32,sums=fixed")
    moved = []
    for axes in ({"data": 1}, TENSOR):
        learner, _, params, batch = on_mesh(axes, "qwen3", precision)
        state, _ = jit(learner.step, sums="fixed")(learner.init(params), batch)
        moved.append(jax.device_get(jax.tree.map(jnp.subtract, state.params, params)))
    one, other = moved
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, one, other))
    assert difference < 1e-6 * optax.tree.norm(one)
