"""The critic's loss by hand, and its gradient on both sides of the clip."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxrl.losses import (
    clipped_value_loss,
    objective,
    one_sequence,
    ppo,
    token_mean,
    value_loss,
    vapo,
)

# Old value 1, clip .2: values inside and on both sides of [.8, 1.2], targets above and below.
VALUES = np.array([1.1, 1.5, 1.5, 0.5, 0.5, 1.3])
RETURNS = np.array([2.0, 2.0, 0.0, 0.0, 2.0, 1.3])
# Towards the target beyond the clip only the clipped value counts: (1.2 - 2)^2, (.8 - 0)^2; away
# from it the loss is free: (1.5 - 0)^2, (.5 - 2)^2. At its target a clipped value still misses.
EXPECTED = 0.5 * np.array([0.9, 0.8, 1.5, 0.8, 1.5, 0.1]) ** 2


def test_by_hand():
    found = clipped_value_loss(jnp.asarray(VALUES), jnp.ones(6), jnp.asarray(RETURNS), clip=0.2)
    np.testing.assert_allclose(found, EXPECTED, rtol=1e-5)


def test_gradient_is_numerical_and_clipped():
    with jax.enable_x64(True):
        old, returns = jnp.ones(6), jnp.asarray(RETURNS)
        loss = jax.jit(lambda v: jnp.sum(clipped_value_loss(v, old, returns, clip=0.2)))
        check_grads(loss, (jnp.asarray(VALUES),), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)
        gradient = jax.grad(loss)(jnp.asarray(VALUES))
    np.testing.assert_allclose(gradient, [-0.9, 0, 1.5, 0, -1.5, 0], atol=1e-6)


def test_huber_is_linear_beyond_its_distance():
    """Errors .9, .5 (clipped .8), 1.5, .5 (.8), 1.5 and .3 (clipped .1), the larger one counts."""
    far = np.array([0.9, 0.8, 1.5, 0.8, 1.5, 0.1])
    expected = np.where(far < 0.85, 0.5 * far**2, 0.85 * (far - 0.5 * 0.85))
    given = (jnp.asarray(VALUES), jnp.ones(6), jnp.asarray(RETURNS))
    found = clipped_value_loss(*given, clip=0.2, huber=0.85)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    quadratic = clipped_value_loss(*given, clip=0.2, huber=10.0)
    np.testing.assert_allclose(quadratic, EXPECTED, rtol=1e-5)
    with jax.enable_x64(True):
        old, returns = jnp.ones(6), jnp.asarray(RETURNS)
        loss = jax.jit(lambda v: jnp.sum(clipped_value_loss(v, old, returns, clip=0.2, huber=0.85)))
        check_grads(loss, (jnp.asarray(VALUES),), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)
        gradient = jax.grad(loss)(jnp.asarray(VALUES))
    np.testing.assert_allclose(gradient, [-0.85, 0, 0.85, 0, -0.85, 0], atol=1e-6)


def test_recipes_pass_the_huber_distance_to_their_critic():
    for recipe in (ppo(value_huber=10.0), vapo(value_huber=10.0)):
        assert repr(value_loss(clip=0.2, huber=10.0)) in repr(recipe.critic)
    with pytest.raises(ValueError, match="huber=0"):
        ppo(value_huber=0)


def judged(**arrays):
    """The six tokens in a row, the last of them not an action."""
    scores, batch = one_sequence(
        advantages=np.zeros(6), action_mask=[True] * 5 + [False], logprobs=np.zeros(6)
    )
    old, returns = (jnp.asarray(x, jnp.float32)[None] for x in (np.ones(6), RETURNS))
    values = jnp.asarray(arrays["values"], jnp.float32)[None]
    return scores.replace(values=values), batch.replace(values=old, returns=returns)


def test_term_counts_action_tokens():
    reduced = objective(value_loss(clip=0.2), token_mean)
    scores, batch = judged(values=VALUES)
    total, metrics = jax.jit(lambda s: reduced.total(s, batch))(scores)
    assert float(total / reduced.denominator(batch)) == pytest.approx(EXPECTED[:5].mean())
    assert float(metrics["value/loss"].value) == pytest.approx(EXPECTED[:5].mean())
    assert float(metrics["value/clipped"].value) == pytest.approx(2 / 5)
    assert float(metrics["value/mean"].value) == pytest.approx(VALUES[:5].mean())


def test_what_is_missing_is_named():
    scores, batch = one_sequence(advantages=[0.0], logprobs=[0.0])
    with pytest.raises(ValueError, match=r"scores\.values"):
        value_loss().apply(scores, batch)
    with pytest.raises(ValueError, match=r"batch\.values"):
        value_loss().apply(scores.replace(values=jnp.zeros((1, 1))), batch)
    with pytest.raises(ValueError, match="clip=0"):
        value_loss(clip=0)


def test_ppo_worked_example():
    """log-probs -2 -> -1.5, advantage .8: ratio 1.6487 is clipped to 1.2, loss -.96."""
    recipe = ppo()
    scores, batch = one_sequence(advantages=[0.8], logprobs=[-1.5], sampler=[-2.0])
    total, _ = jax.jit(lambda s: recipe.objective.total(s, batch))(scores)
    assert float(total) == pytest.approx(-0.96)
