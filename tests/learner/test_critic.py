"""The critic: how a batch is laid out changes nothing of what it says, and it learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.core.batch import Minibatch
from jaxrl.core.metrics import to_floats
from jaxrl.core.packing import MinibatchShape, pack_minibatch, unpack
from jaxrl.core.precision import PRESETS
from jaxrl.learner.critic import CriticLearner, make_critic
from jaxrl.losses import ppo
from jaxrl.models.model import decoder
from tests import tiny

FP32 = PRESETS["fp32"]
MODEL = decoder(dataclasses.replace(tiny.CONFIG, scored=True))
ROLLOUTS = tiny.rollouts(8)
ROW = 24
TARGETS = [np.full(len(r.completion), r.reward, np.float32) for r in ROLLOUTS]


def params():
    found = tiny.drawn(MODEL.specs, 0)
    head = np.random.default_rng(0).normal(size=(1, tiny.CONFIG.hidden_size))
    return found | {"score": jnp.asarray(0.1 * head, jnp.float32)}


@pytest.fixture(scope="module")
def critic() -> CriticLearner:
    recipe = ppo(value_clip=100.0).critic
    assert recipe is not None
    pure = make_critic(MODEL, recipe, optimizer=optax.adam(3e-3), precision=FP32)
    return pure._replace(values=jax.jit(pure.values), step=jax.jit(pure.step))


PACKED = MinibatchShape(row_length=ROW, rows_per_microbatch=2, max_rows=8)
SINGLE = dataclasses.replace(PACKED, packed=False)


def minibatch(shape, *, values=None) -> Minibatch:
    given = {} if values is None else {"values": values, "returns": TARGETS}
    return pack_minibatch(ROLLOUTS, [0.0] * 8, shape=shape, **given)


def values_by_rollout(critic, shape) -> list[np.ndarray]:
    """Values before and after each token, f32[C, 2] for each rollout."""
    values = critic.values(params(), minibatch(shape))
    return unpack(np.asarray(values), ROLLOUTS, shape=shape)


def test_values_are_read_before_and_after_each_token(critic):
    """Packed equals unpacked equals one sequence alone."""
    packed = values_by_rollout(critic, PACKED)
    single = values_by_rollout(critic, SINGLE)
    weights = params()
    rollout = ROLLOUTS[0]
    tokens = np.concatenate([rollout.prompt, rollout.completion])[None]
    positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
    hidden = MODEL.hidden(weights, tokens, positions, np.ones_like(tokens), precision=FP32)
    outputs = np.asarray(hidden[0] @ weights["score"][0])
    before = slice(len(rollout.prompt) - 1, tokens.shape[1] - 1)
    expected = np.where(rollout.action_mask, outputs[before], 0)
    np.testing.assert_allclose(single[0][:, 0], expected, atol=1e-5)
    np.testing.assert_allclose(single[0][:, 1], outputs[len(rollout.prompt) :], atol=1e-5)
    for a, b, one in zip(packed, single, ROLLOUTS, strict=True):
        assert a.shape == (len(one.completion), 2)
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_it_learns_what_was_received(critic):
    state = critic.init(params())
    values = [one[:, 0] for one in values_by_rollout(critic, SINGLE)]
    batch = minibatch(SINGLE, values=values)
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
    assert critic.step._cache_size() == 1
