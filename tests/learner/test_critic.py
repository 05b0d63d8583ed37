"""The critic: how a batch is laid out changes nothing of what it says, and it learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.core.batch import Minibatch
from jaxrl.core.metrics import to_floats
from jaxrl.core.packing import assign_rows, gather, interleave, pack
from jaxrl.core.precision import PRESETS
from jaxrl.learner.critic import CriticLearner, make_critic
from jaxrl.losses import ppo
from jaxrl.models import spec
from jaxrl.models.decoder import decoder
from tests import tiny

FP32 = PRESETS["fp32"]
MODEL = decoder(dataclasses.replace(tiny.CONFIG, scored=True))
ROLLOUTS = tiny.rollouts(8)
ROW = 24
TARGETS = [np.full(len(r.completion), r.reward, np.float32) for r in ROLLOUTS]


def params():
    found = spec.init(MODEL.specs, jax.random.key(0), dtype=FP32.params)
    head = np.random.default_rng(0).normal(size=(1, tiny.CONFIG.hidden_size))
    return found | {"score": jnp.asarray(0.1 * head, jnp.float32)}


@pytest.fixture(scope="module")
def critic() -> CriticLearner:
    recipe = ppo(value_clip=100.0).critic
    assert recipe is not None
    pure = make_critic(
        MODEL, recipe, optimizer=optax.adam(3e-3), precision=FP32, rows_per_microbatch=2
    )
    return pure._replace(values=jax.jit(pure.values), step=jax.jit(pure.step))


def minibatch(rows, *, values=None) -> tuple[Minibatch, list]:
    placed, used = interleave(rows, rows_per_microbatch=2, max_microbatches=4)
    batch = pack(
        ROLLOUTS, [0.0] * 8, values=values, returns=values and TARGETS, rows=placed, row_length=ROW
    )
    return Minibatch(batch=jax.tree.map(jnp.asarray, batch), microbatches=jnp.int32(used)), placed


def values_by_rollout(critic, rows) -> list[np.ndarray]:
    batch, placed = minibatch(rows)
    return gather(np.asarray(critic.values(params(), batch)), ROLLOUTS, rows=placed)


def test_a_value_is_the_heads_output_at_the_token_before(critic):
    """Packed equals unpacked equals one sequence alone."""
    packed = values_by_rollout(critic, assign_rows([r.length for r in ROLLOUTS], row_length=ROW))
    single = values_by_rollout(critic, [[i] for i in range(8)])
    weights = params()
    rollout = ROLLOUTS[0]
    tokens = np.concatenate([rollout.prompt, rollout.completion])[None]
    positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
    hidden = MODEL.hidden(weights, tokens, positions, np.ones_like(tokens), precision=FP32)
    outputs = np.asarray(hidden[0] @ weights["score"][0])
    before = slice(len(rollout.prompt) - 1, tokens.shape[1] - 1)
    expected = np.where(rollout.action_mask, outputs[before], 0)
    np.testing.assert_allclose(single[0], expected, atol=1e-5)
    for a, b, one in zip(packed, single, ROLLOUTS, strict=True):
        assert a.shape == one.completion.shape
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_it_learns_what_was_received(critic):
    state, rows = critic.init(params()), [[i] for i in range(8)]
    values = values_by_rollout(critic, rows)
    batch, _ = minibatch(rows, values=values)
    losses = []
    for _ in range(40):
        state, metrics = critic.step(state, batch)
        losses.append(to_floats(metrics)["value/loss"])
    assert losses[-1] < 0.1 * losses[0]
    wrong = np.concatenate([v - t for v, t in zip(values, TARGETS, strict=True)])
    mask = np.concatenate([r.action_mask for r in ROLLOUTS])
    assert losses[0] == pytest.approx(0.5 * np.mean(wrong[mask] ** 2), rel=1e-4)
    names = to_floats(metrics).keys()
    assert {"value/loss", "value/clipped", "value/grad_norm"} <= names
    assert all(name.startswith("value/") for name in names)
    assert critic.step._cache_size() == 1  # pyright: ignore
