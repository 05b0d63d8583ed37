"""The learner's functions are plain: they scan over minibatches, map over stacked states, and their
state is a tree of arrays like any other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from jaxrl.core.compiled import jit
from jaxrl.core.metrics import to_floats
from jaxrl.core.precision import PRESETS
from jaxrl.learner.policy import make_learner
from jaxrl.losses import grpo
from tests import tiny
from tests.learner.test_policy import minibatch

LEARNER = make_learner(
    tiny.model(),
    grpo().objective,
    optimizer=optax.inject_hyperparams(optax.adam)(1e-2),
    precision=PRESETS["fp32"],
)
STEP = jit(LEARNER.step)
BATCHES = [minibatch(count, rows_per_microbatch=2, seed=count) for count in (3, 8, 5)]


def stack(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def beginnings():
    """States that differ in their parameters and in their learning rate."""
    for i in range(2):
        state = LEARNER.init(tiny.params(i))
        state.opt_state.hyperparams["learning_rate"] = jnp.float32(1e-2 / (i + 1))
        yield state


@functools.cache
def one_by_one():
    """What each state becomes, and its metrics, by single steps."""
    ends = []
    for state in beginnings():
        numbers = []
        for batch in BATCHES:
            state, metrics = STEP(state, batch)
            numbers.append(to_floats(metrics))
        ends.append((state, numbers))
    return ends


def assert_states(found, expected):
    """Equal in all that is counted; parameters to the rounding of f32 in three steps of Adam."""
    assert (found.step, found.loss_scale.skipped) == (expected.step, expected.loss_scale.skipped)
    for (path, x), y in zip(
        jax.tree.leaves_with_path(found.params), jax.tree.leaves(expected.params), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=0, atol=5e-6, err_msg=str(path))


def assert_metrics(found, *, expected):
    for i, numbers in enumerate(expected):
        got = to_floats(jax.tree.map(lambda x, i=i: x[i], found))
        assert got == pytest.approx(numbers, rel=1e-3, abs=1e-5)


def test_scans_of_stacked_states_equal_single_steps():
    """A sweep in one program that donates its states, over the same minibatches."""
    sweep = jax.vmap(functools.partial(jax.lax.scan, LEARNER.step), in_axes=(0, None))
    sweep = jit(sweep, donate_argnums=0)
    afters, metrics = jax.device_get(sweep(stack(beginnings()), stack(BATCHES)))
    moved = []
    for i, (expected, numbers) in enumerate(one_by_one()):
        after, own = jax.tree.map(lambda x, i=i: x[i], (afters, metrics))
        assert_states(after, expected)
        assert_metrics(own, expected=numbers)
        moved.append(np.asarray(after.params["embed"]))
    assert np.abs(moved[0] - moved[1]).max() > 1e-2


def test_orbax_saves_a_state_by_itself(tmp_path):
    state, _ = STEP(next(beginnings()), BATCHES[0])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: state))
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    jax.tree.map(
        np.testing.assert_array_equal, STEP(restored, BATCHES[1])[0], STEP(state, BATCHES[1])[0]
    )
