"""The gate takes a step that raises the served policy's objective, and no other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.core.metrics import to_floats
from jaxrl.core.packing import MinibatchShape, pack_minibatch
from jaxrl.learner.gate import gated
from jaxrl.learner.policy import make_learner
from jaxrl.losses import grpo, objective, over_sampler, token_mean, unclipped
from jaxrl.models.model import decoder
from tests import tiny
from tests.run_config import run_config

MODEL = decoder(tiny.CONFIG)
ROLLOUTS = tiny.rollouts(6)
SHAPE = MinibatchShape(row_length=24, rows_per_microbatch=3)
BATCH = pack_minibatch(ROLLOUTS, [1.0, -0.5, 2.0, 0.3, -1.0, 0.7], shape=SHAPE)


def test_a_step_is_taken_if_the_served_policy_gains():
    """At a small learning rate it gains; a step against the gradient, or far too long, does not."""
    learner = make_learner(
        MODEL,
        objective(unclipped(over_sampler), token_mean),
        optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=0.0, momentum=0.9),
        precision="phantom,wire=f8_e4m3",
    )
    programs = learner.step, gated(learner), learner.shadow_scores
    step, gate, scores = (jax.jit(program) for program in programs)
    batch, taken = BATCH.batch, set()
    mask, sampler = np.asarray(batch.action_mask), batch.sampler_logprobs
    for rate in (3e-2, -3e-2, 30.0):
        begin = learner.init(tiny.params())
        begin.opt_state.hyperparams["learning_rate"] = jnp.float32(rate)
        new, (after, metrics) = step(begin, BATCH)[0], gate(begin, BATCH)
        ratios = [jnp.exp(scores(s.params, BATCH)[0] - sampler) for s in (begin, new)]
        served = [np.asarray(batch.advantages * r)[mask].mean() for r in ratios]
        found, gain = to_floats(metrics), served[1] - served[0]
        assert found["update/gain"] == pytest.approx(gain, rel=1e-3, abs=1e-6)
        assert found["update/rejected"] == float(gain < 0)
        expected = begin if gain < 0 else new
        for name in ("params", "opt_state"):
            jax.tree.map(
                np.testing.assert_array_equal, getattr(after, name), getattr(expected, name)
            )
        assert int(after.step) == 1
        taken.add(bool(gain >= 0))
    assert taken == {True, False}


def test_one_impossible_token_leaves_the_gain_finite():
    """Servers report -9999 for a probability of 0. The other tokens decide."""
    learner = make_learner(
        MODEL, objective(unclipped(over_sampler), token_mean), optimizer=optax.sgd(1e-2)
    )
    batch = BATCH.batch
    place = tuple(np.argwhere(np.asarray(batch.action_mask))[0])
    sampler = jnp.asarray(batch.sampler_logprobs).at[place].set(-9999.0)
    given = dataclasses.replace(BATCH, batch=batch.replace(sampler_logprobs=sampler))
    _, metrics = jax.jit(gated(learner))(learner.init(tiny.params()), given)
    assert np.isfinite(to_floats(metrics)["update/gain"])


def test_a_refused_step_counts_for_the_learning_rate():
    """A gain that is not a number is refused: weights and moments stay, the schedule goes on."""
    optimizer = optax.sgd(optax.linear_schedule(1.0, 0.0, 9), momentum=0.9)
    learner = make_learner(MODEL, grpo().objective, optimizer=optimizer, precision="fp32")

    def step(state, minibatch):
        return dataclasses.replace(
            state,
            params=jax.tree.map(lambda x: x * jnp.nan, state.params),
            opt_state=jax.tree.map(lambda x: x + 1, state.opt_state),
        ), {}

    begin = learner.init(tiny.params())
    after, metrics = jax.jit(gated(learner._replace(step=step)))(begin, BATCH)
    (trace, before), (kept, scheduled) = begin.opt_state, after.opt_state
    for old, new in ((begin.params, after.params), (trace, kept)):
        jax.tree.map(np.testing.assert_array_equal, new, old)
    assert (int(before.count), int(scheduled.count)) == (0, 1)
    assert to_floats(metrics)["update/rejected"] == 1


@pytest.mark.parametrize(
    ("key", "value"), [("optimizer.offload", "true"), ("critic.trunk", "shared")]
)
def test_states_that_cannot_be_compared_are_refused(key, value):
    with pytest.raises(ValueError, match=rf"train\.gate .*{key} = .?{value}"):
        run_config("nothing", train__gate="true", **{key: value})
