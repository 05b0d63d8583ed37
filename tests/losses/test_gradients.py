"""Gradients against numerical differentiation in f64, on both sides of every clip and clamp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxrl.losses import (
    anchor_over_sampler,
    clipped,
    entropy_bonus,
    geometric,
    grpo,
    k1,
    k2,
    k3,
    kl_penalty,
    over_anchor,
    over_sampler,
    product,
    reweight,
    truncated,
    unclipped,
    with_terms,
)
from tests.losses.cases import compiled, one_row

# Log-ratios inside and outside [log .8, log 1.2], beyond a cap of 1.4, a dual clip of 1.5, and
# k3's bound of 10, with both signs of the advantage; none on a kink.
LOG_RATIOS = np.array(
    [-3.5, -0.5, -0.25, -0.2, -0.05, 0.0, 0.1, 0.17, 0.2, 0.3, 0.37, 0.45, 1.2, 3.5]
)
DIFFERENTIABLE = {
    "unclipped": unclipped(over_sampler),
    "clipped": clipped(over_sampler),
    "clip-higher": clipped(over_anchor, high=0.28),
    "dual": clipped(over_sampler, dual=1.5),
    "cap": clipped(over_sampler, cap=1.4),
    "product": clipped(product(over_sampler), low=0.9, high=30.0),
    "geometric": clipped(geometric(over_anchor)),
    "corrected": reweight(clipped(over_anchor), truncated(anchor_over_sampler, high=2.0)),
    "k1": kl_penalty(k1),
    "k2": kl_penalty(k2),
    "k3": kl_penalty(k3),
    "grpo": clipped(over_sampler) + 0.1 * kl_penalty(k3) + -0.01 * entropy_bonus(),
}


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradient_is_the_numerical_one(name, sign):
    with jax.enable_x64(True):
        old = np.linspace(-3.0, -4.0, len(LOG_RATIOS))
        scores, batch = one_row(
            advantages=sign * np.linspace(0.5, 1.5, len(LOG_RATIOS)),
            logprobs=old + LOG_RATIOS,
            sampler=old,
            anchor=old - 0.02,
            reference=old,
            entropy=np.ones(len(LOG_RATIOS)),
        )
        # Different weights: no token's error may hide behind another's.
        weights = jnp.linspace(1.0, 2.0, len(LOG_RATIOS))[None]

        @jax.jit
        def weighted(logprobs):
            changed = scores.replace(logprobs=logprobs, entropy=-logprobs)
            return jnp.sum(weights * DIFFERENTIABLE[name].apply(changed, batch)[0])

        check_grads(weighted, (scores.logprobs,), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_clipped_branches_have_no_gradient(sign):
    """PPO's four cases: the gradient stops only where the ratio has paid enough."""
    scores, batch = one_row(
        advantages=[sign] * 4, logprobs=[-0.5, -0.1, 0.1, 0.5], sampler=[0.0] * 4
    )
    term = clipped(over_sampler)
    gradient = compiled(
        jax.grad(lambda lp: term.apply(scores.replace(logprobs=lp), batch)[0].sum())
    )(scores.logprobs)
    alive = [1, 1, 1, 0] if sign > 0 else [0, 1, 1, 1]
    np.testing.assert_allclose(gradient[0], -sign * np.exp(scores.logprobs[0]) * np.array(alive))


def test_a_recipe_differentiates_through_its_aggregation():
    with jax.enable_x64(True):
        scores, batch = one_row(
            advantages=[1.0, -1.0, 0.5, 2.0],
            logprobs=[-1.0, -2.0, -0.5, -3.0],
            sampler=[-1.1, -1.9, -0.9, -2.9],
            reference=[-1.2, -2.0, -0.4, -2.0],
            action_mask=[True, True, False, True],
        )
        objective = with_terms(grpo(), kl=0.1).objective
        total = jax.jit(lambda lp: objective.total(scores.replace(logprobs=lp), batch)[0])
        check_grads(total, (scores.logprobs,), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)
