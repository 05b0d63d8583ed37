"""Gradients against numerical differentiation in f64, on both sides of every clip and clamp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxrl.losses import (
    absolute,
    anchor_over_sampler,
    binary_kl,
    cispo,
    clipped,
    dppo,
    drift_penalty,
    entropy_bonus,
    geometric,
    geometric_clipped,
    grpo,
    k1,
    k2,
    k3,
    kl_penalty,
    likelihood,
    off_policy_negatives,
    one_sequence,
    over_anchor,
    over_sampler,
    pg_seq_is,
    pg_token_is,
    positive_likelihood,
    prime,
    prime_ipo,
    product,
    reweight,
    soft_gated,
    truncated,
    unclipped,
    vespo,
    with_terms,
)

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
    "soft gate": soft_gated(over_sampler),
    "geometric clip": geometric_clipped(over_sampler),
    "likelihood": likelihood(),
    "rejected": reweight(clipped(over_sampler), off_policy_negatives(over_sampler, delta=9.0)),
    "drift": drift_penalty(over_sampler),
    "absolute drift": drift_penalty(over_sampler, absolute),
    "positive nll": positive_likelihood().loss,
    "weighted k3": kl_penalty(k3, ratio=over_sampler),
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
        scores, batch = one_sequence(
            advantages=sign * np.linspace(0.5, 1.5, len(LOG_RATIOS)),
            logprobs=old + LOG_RATIOS,
            sampler=old,
            anchor=old - 0.02,
            reference=old,
            entropy=np.ones(len(LOG_RATIOS)),
            rewards=np.arange(len(LOG_RATIOS)) % 2,
        )
        # Different weights: no token's error may hide behind another's.
        weights = jnp.linspace(1.0, 2.0, len(LOG_RATIOS))[None]

        @jax.jit
        def weighted(logprobs):
            changed = scores.replace(logprobs=logprobs, entropy=-logprobs)
            return jnp.sum(weights * DIFFERENTIABLE[name].apply(changed, batch)[0])

        check_grads(weighted, (scores.logprobs,), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


# Weights that no gradient flows through: loss = -weight(r) A log pi, so the gradient is -weight A.
WEIGHTED = {
    "cispo": (cispo(low=0.8, high=1.2), lambda r, a: np.clip(r, 0.8, 1.2)),
    "cispo, upper bound": (cispo(high=1.3), lambda r, a: np.minimum(r, 1.3)),
    "pg_token_is": (pg_token_is(), lambda r, a: r),
    "pg_token_is, bounded": (pg_token_is(high=1.1), lambda r, a: np.minimum(r, 1.1)),
    "pg_seq_is": (pg_seq_is(), lambda r, a: np.prod(r)),
    "pg_seq_is, bounded": (pg_seq_is(high=1.01), lambda r, a: min(np.prod(r), 1.01)),
    "vespo": (
        vespo(),
        lambda r, a: np.where(
            a >= 0,
            np.prod(r) ** 2 * np.exp(3 - 3 * np.prod(r)),
            np.prod(r) ** 3 * np.exp(2 - 2 * np.prod(r)),
        ),
    ),
    "dppo": (
        dppo(low=0.01, high=0.02, cap=1.3),
        lambda r, a: np.minimum(r, 1.3) * _within_variation(r, a, low=0.01, high=0.02),
    ),
    "dppo, binary KL": (
        dppo(divergence=binary_kl, low=1e-3, high=2e-3),
        lambda r, a: np.minimum(r, 20) * _within_binary_kl(r, a, low=1e-3, high=2e-3),
    ),
    "prime_ipo": (
        prime_ipo(high=0.01, drift=0.0),
        lambda r, a: r * (np.abs(r - 1) * _others(r) <= 0.01),
    ),
    "prime": (
        prime(low=0.01, high=0.02, drift=0.0),
        lambda r, a: r * _within_variation(r, a, low=0.01, high=0.02),
    ),
}


def _others(r):
    return np.exp(np.linspace(-3.0, -4.0, len(r)))


def _within_variation(r, a, *, low, high):
    q = _others(r)
    return np.where(a > 0, r * q - q <= high, r * q - q >= -low)


def _within_binary_kl(r, a, *, low, high):
    q = _others(r)
    p = r * q
    apart = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    return np.where(a > 0, (p <= q) | (apart <= high), (p >= q) | (apart <= low))


@pytest.mark.parametrize("name", WEIGHTED)
def test_fixed_weights_by_hand(name):
    """On both sides of every bound, for both signs of the advantage."""
    with jax.enable_x64(True):
        recipe, weight = WEIGHTED[name]
        old = np.linspace(-3.0, -4.0, len(LOG_RATIOS))

        @jax.jit
        def gradient(scores, batch):
            total = recipe.objective.total
            return jax.grad(lambda lp: total(scores.replace(logprobs=lp), batch)[0])(
                scores.logprobs
            )

        for sign in (1.0, -1.0):
            advantages = sign * np.linspace(0.5, 1.5, len(LOG_RATIOS))
            case = one_sequence(advantages=advantages, logprobs=old + LOG_RATIOS, sampler=old)
            expected = -weight(np.exp(LOG_RATIOS), advantages) * advantages
            np.testing.assert_allclose(gradient(*case)[0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_clipped_branches_have_no_gradient(sign):
    """PPO's four cases: the gradient stops only where the ratio has paid enough."""
    scores, batch = one_sequence(
        advantages=[sign] * 4, logprobs=[-0.5, -0.1, 0.1, 0.5], sampler=[0.0] * 4
    )
    term = clipped(over_sampler)
    gradient = jax.jit(
        jax.grad(lambda lp: term.apply(scores.replace(logprobs=lp), batch)[0].sum())
    )(scores.logprobs)
    alive = [1, 1, 1, 0] if sign > 0 else [0, 1, 1, 1]
    np.testing.assert_allclose(gradient[0], -sign * np.exp(scores.logprobs[0]) * np.array(alive))


def test_a_recipe_differentiates_through_its_aggregation():
    with jax.enable_x64(True):
        scores, batch = one_sequence(
            advantages=[1.0, -1.0, 0.5, 2.0],
            logprobs=[-1.0, -2.0, -0.5, -3.0],
            sampler=[-1.1, -1.9, -0.9, -2.9],
            reference=[-1.2, -2.0, -0.4, -2.0],
            action_mask=[True, True, False, True],
        )
        objective = with_terms(grpo(), kl=0.1).objective
        total = jax.jit(lambda lp: objective.total(scores.replace(logprobs=lp), batch)[0])
        check_grads(total, (scores.logprobs,), order=1, modes=["rev"], atol=1e-6, rtol=1e-6)
