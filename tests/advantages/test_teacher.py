"""On-policy distillation: the teacher's part of an advantage."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.advantages.teacher import log_ratios, with_log_ratios


def test_expected_gradient_is_reverse_kl():
    """Every token of one step is drawn as often as its probability says."""
    logits, teacher = (
        np.asarray(jax.random.normal(jax.random.key(i), (7,)), np.float32) for i in (0, 1)
    )
    p, q = jax.nn.log_softmax(jnp.array(logits)), np.asarray(jax.nn.log_softmax(teacher))
    ratios = log_ratios([q], [np.asarray(p)], [np.ones(7, bool)])
    (advantages,) = with_log_ratios(np.zeros(1), ratios, weight=1.0)

    def surrogate(logits):
        return -jnp.sum(jnp.exp(p) * advantages * jax.nn.log_softmax(logits))

    def reverse_kl(logits):
        p = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(p) * (p - q))

    np.testing.assert_allclose(
        jax.grad(surrogate)(logits), jax.grad(reverse_kl)(logits), rtol=1e-5, atol=1e-6
    )


def test_reward_is_mixed_in_by_weight():
    teacher = [np.array([-1.0, -3.0, np.nan]), np.array([-9999.0])]
    sampler = [np.array([-2.0, -1.0, -1.0]), np.array([-1.0])]
    ratios = log_ratios(teacher, sampler, [np.array([True, False, True]), np.ones(1, bool)])
    np.testing.assert_array_equal(np.concatenate(ratios), [1.0, 0.0, 0.0, -20.0])
    mixed = with_log_ratios(np.array([0.5, -0.5]), ratios, weight=0.25)
    np.testing.assert_array_equal(np.concatenate(mixed), [0.75, 0.5, 0.5, -5.5])
    by_token = with_log_ratios([np.arange(3.0), np.zeros(1)], ratios, weight=0.0)
    np.testing.assert_array_equal(np.concatenate(by_token), [0.0, 1.0, 2.0, 0.0])
