"""KL estimators by hand and against the divergence that they estimate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.metrics import to_floats
from jaxrl.losses import (
    drift_penalty,
    entropy_bonus,
    grpo,
    k1,
    k1_plus,
    k2,
    k3,
    k3_plus,
    kl_penalty,
    one_sequence,
    over_sampler,
    with_terms,
)

ESTIMATORS = (k1, k2, k3, k1_plus, k3_plus)
D = np.array([-50.0, -1.0, 0.0, 0.5, 50.0])  # reference - learner


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),  # gradient with respect to the learner's log-prob
    [
        (k1, [50, 1, 0, -0.5, -50], [1, 1, 1, 1, 1]),
        (k2, [1250, 0.5, 0, 0.125, 1250], [50, 1, 0, -0.5, -50]),
        (
            k3,
            [10, np.exp(-1), 0, np.exp(0.5) - 1.5, 10],
            [0, 1 - np.exp(-1), 0, 1 - np.exp(0.5), 0],
        ),
        (k1_plus, [50, 1, 0, -0.5, -50], [50, 1, 0, -0.5, -50]),
        (k3_plus, [10, np.exp(-1), 0, np.exp(0.5) - 1.5, 10], [50, 1, 0, -0.5, -50]),
    ],
)
def test_value_and_gradient(estimator, value, gradient):
    scores, batch = one_sequence(advantages=[0.0] * 5, logprobs=[-60.0] * 5, reference=-60.0 + D)

    def total(logprobs):
        loss, metrics = kl_penalty(estimator).apply(scores.replace(logprobs=logprobs), batch)
        return loss.sum(), (loss, metrics)

    (_, (loss, metrics)), grad = jax.jit(jax.value_and_grad(total, has_aux=True))(scores.logprobs)
    np.testing.assert_allclose(loss[0], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grad[0], gradient, rtol=1e-5, atol=1e-6)
    assert to_floats(metrics) == pytest.approx({"kl/reference": np.mean(value)}, rel=1e-5)


def test_expectations_over_a_distribution():
    """In expectation under the learner: k1 and k3 are the divergence, and k2 has its gradient."""
    with jax.enable_x64(True):
        logits, other = jnp.array([0.3, -1.0, 0.8, 0.0]), jnp.array([0.1, 0.2, 0.3, -0.5])
        reference = jax.nn.log_softmax(other)

        def divergence(logits):
            p = jax.nn.log_softmax(logits)
            return jnp.sum(jnp.exp(p) * (p - reference))

        def sampled(estimator, logits):
            p = jax.nn.log_softmax(logits)
            return jnp.sum(jax.lax.stop_gradient(jnp.exp(p)) * estimator(reference - p))

        @jax.jit
        def values_and_gradients(logits):
            found = {e: jax.value_and_grad(sampled, argnums=1)(e, logits) for e in ESTIMATORS}
            return list(found.values()), jax.value_and_grad(divergence)(logits)

        results, (value, gradient) = values_and_gradients(logits)
        found = dict(zip(ESTIMATORS, results, strict=True))
        for estimator in (k1, k3, k1_plus, k3_plus):
            np.testing.assert_allclose(found[estimator][0], value, rtol=1e-12)
        for estimator in (k2, k1_plus, k3_plus):
            np.testing.assert_allclose(found[estimator][1], gradient, rtol=1e-10)
        np.testing.assert_allclose(found[k1][1], 0, atol=1e-12)


def test_entropy_bonus_raises_entropy():
    scores, batch = one_sequence(advantages=[0.0] * 2, logprobs=-1.0, entropy=[0.5, 1.5])
    loss, metrics = jax.jit(entropy_bonus().apply)(scores, batch)
    np.testing.assert_array_equal(loss, [[-0.5, -1.5]])
    assert to_floats(metrics) == {"entropy": 1.0}


def gradient(term, scores, batch):
    return jax.jit(jax.grad(lambda lp: term.apply(scores.replace(logprobs=lp), batch)[0].sum()))(
        scores.logprobs
    )[0]


def test_weighted_divergence_keeps_the_gradient():
    """In expectation under the sampler, the weighted k3 is the divergence, value and gradient."""
    with jax.enable_x64(True):
        logits = jnp.array([0.3, -1.0, 0.8, 0.0])
        sampler, reference = (
            jax.nn.log_softmax(jnp.array(x)) for x in ([0.2, -0.5, 0.5, 0.4], [0.1, 0.2, 0.3, -0.5])
        )
        term = kl_penalty(k3, ratio=over_sampler)

        def sampled(logits):
            p = jax.nn.log_softmax(logits)
            scores, batch = one_sequence(
                advantages=[0.0] * 4, logprobs=p, sampler=sampler, reference=reference
            )
            return jnp.sum(jnp.exp(sampler) * term.apply(scores, batch)[0][0])

        def divergence(logits):
            p = jax.nn.log_softmax(logits)
            return jnp.sum(jnp.exp(p) * (p - reference))

        found = jax.jit(
            lambda x: (jax.value_and_grad(sampled)(x), jax.value_and_grad(divergence)(x))
        )
        (value, slope), (expected, gradient) = found(logits)
        np.testing.assert_allclose(value, expected, rtol=1e-10)
        np.testing.assert_allclose(slope, gradient, rtol=1e-8, atol=1e-12)


def test_drift_is_the_squared_log_ratio():
    scores, batch = one_sequence(advantages=[1.0] * 3, logprobs=-1.0, sampler=[-1.5, -1.0, np.nan])
    loss, metrics = jax.jit(drift_penalty(over_sampler).apply)(scores, batch)
    np.testing.assert_allclose(loss[0], [0.25, 0, 0], atol=1e-7)
    assert to_floats(metrics) == {"drift": pytest.approx(0.25 / 3)}
    np.testing.assert_allclose(gradient(drift_penalty(over_sampler), scores, batch), [1, 0, 0])


def test_a_coefficient_of_zero_needs_no_score():
    recipe = grpo()
    assert with_terms(recipe).objective.needs == frozenset()
    assert with_terms(recipe, kl=0.1).objective.needs == {"reference"}
    assert with_terms(recipe, observation_nll=0.1).objective.needs == {"observed"}
    assert with_terms(recipe, kl=0.1, entropy=0.1).objective.needs == {"reference", "entropy"}
    with pytest.raises(ValueError, match=r"kl=-0\.1"):
        with_terms(recipe, kl=-0.1)
