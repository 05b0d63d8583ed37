"""Early stop: a rollout batch ends at the mini-batch that finds the policy too far away."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxrl.core import MinibatchShape, Rollout, jit, pack_minibatch, unpack
from jaxrl.learner import State, make_learner
from jaxrl.losses import grpo
from jaxrl.train import update
from jaxrl.training.progress import Progress
from tests import tiny

SHAPE = MinibatchShape(row_length=16, rows_per_microbatch=4, packed=False)


@pytest.fixture(scope="module")
def learning() -> Any:
    recipe = grpo()
    pure = make_learner(tiny.model(), recipe.objective, optimizer=optax.adam(3e-3))
    learner = pure._replace(step=jit(pure.step), score=jit(pure.score))
    return SimpleNamespace(
        recipe=recipe, learner=learner, critic=None, learning_rate=lambda step: 3e-3
    )


@pytest.fixture(scope="module")
def sampled(learning) -> list[Rollout]:
    """Four rollouts in each of four mini-batches, with log-probs of the policy before its update;
    all have the same prompt, so that an update moves the others."""
    given = tiny.rollouts(16)
    given = [
        one._replace(prompt=given[0].prompt, action_mask=np.ones(len(one.completion), bool))
        for one in given
    ]
    batch = pack_minibatch(given, [0.0] * 16, shape=SHAPE)
    logprobs = np.asarray(learning.learner.score(tiny.params(), batch))
    return [
        one._replace(logprobs=found)
        for one, found in zip(given, unpack(logprobs, given, shape=SHAPE), strict=True)
    ]


def trained(learning, sampled, *, count: int = 4, rows: int = 4, **options):
    shape = dataclasses.replace(SHAPE, rows_per_microbatch=rows)
    minibatches = [
        pack_minibatch(sampled[i : i + 4], [1.0, -1.0, 1.0, -1.0], shape=shape)
        for i in range(0, 4 * count, 4)
    ]
    state = State(learning.learner.init(tiny.params()))
    found: Any = {"minibatches": minibatches, "progress": Progress(), "pretraining": False}
    return update(learning, state, **found | options)


def divergences(learning, sampled) -> list[float]:
    """E[w - log w - 1] of each mini-batch before its step, computed here."""
    found = []
    for taken in range(4):
        state, _ = trained(learning, sampled, count=taken) if taken else (None, None)
        params = tiny.params() if state is None else state.policy.params
        some = sampled[4 * taken : 4 * taken + 4]
        scores = learning.learner.score(params, pack_minibatch(some, [0.0] * 4, shape=SHAPE))
        here = np.concatenate(unpack(np.asarray(scores), some, shape=SHAPE)).astype(float)
        delta = here - np.concatenate([one.logprobs for one in some])
        found.append(float(np.mean(np.exp(delta) - delta - 1)))
    return found


def test_what_follows_the_bound_is_left_out(learning, sampled):
    kls = divergences(learning, sampled)
    assert kls[0] < 1e-9 < kls[1] < kls[2] < kls[3]  # the policy moves away
    for last in (1, 2):
        bound = (kls[last - 1] + kls[last]) / 2
        for rows in (4, 1):  # microbatches do not change it
            state, numbers = trained(learning, sampled, rows=rows, max_kl=bound)
            expected, same = trained(learning, sampled, count=last + 1, rows=rows)
            assert numbers.pop("update/left_out") == 3 - last
            assert numbers == same
            jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_a_bound_that_is_kept_changes_nothing(learning, sampled):
    state, numbers = trained(learning, sampled, max_kl=1.0)
    expected, same = trained(learning, sampled)
    assert numbers == same | {"update/left_out": 0.0}
    jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_unknown_log_probs_stop_nothing(learning, sampled):
    silent = [one._replace(logprobs=np.full_like(one.logprobs, np.nan)) for one in sampled]
    _, numbers = trained(learning, silent, max_kl=1e-9)
    assert numbers["update/left_out"] == 0
