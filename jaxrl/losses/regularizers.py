"""Terms that hold the policy in place: KL to a frozen reference, entropy.

KL estimators (Schulman, "Approximating KL divergence") are functions of d = reference - learner,
the log-ratio at a sampled token. `k1` and `k3` estimate the divergence; the gradient of `k2` is
that of the divergence, while the gradient of `k1` is zero in expectation. `k1_plus` and `k3_plus`
take the value from one and the gradient from the other.
"""

from typing import Protocol

import jax
import jax.numpy as jnp

from jaxrl.batch import TokenBatch
from jaxrl.losses.algebra import Need, Scores, TokenLoss, require, token_loss
from jaxrl.metrics import Metrics, masked_mean


class KLEstimator(Protocol):
    """log-ratio reference - learner f32[B, T] -> estimate per token f32[B, T]."""

    def __call__(self, d: jax.Array, /) -> jax.Array: ...


def k1(d: jax.Array) -> jax.Array:
    """-d: unbiased, of either sign. As a loss its gradient is zero in expectation."""
    return -d


def k2(d: jax.Array) -> jax.Array:
    """d^2 / 2: biased, never negative."""
    return d**2 / 2


def k3(d: jax.Array) -> jax.Array:
    """e^d - d - 1: unbiased, never negative; d clamped to +-20 and the result to 10."""
    d = jnp.clip(d, -20.0, 20.0)
    return jnp.minimum(jnp.expm1(d) - d, 10.0)


def k1_plus(d: jax.Array) -> jax.Array:
    """The value of k1 with the gradient of k2."""
    return _value_and_gradient(k1(d), k2(d))


def k3_plus(d: jax.Array) -> jax.Array:
    """The value of k3 with the gradient of k2."""
    return _value_and_gradient(k3(d), k2(d))


def _value_and_gradient(value: jax.Array, gradient: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(value) + (gradient - jax.lax.stop_gradient(gradient))


def kl_penalty(estimator: KLEstimator = k3) -> TokenLoss:
    """Divergence of the learner from the reference, per token; "kl" reports its mean."""

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        value = estimator(require(scores, Need.REFERENCE) - scores.logprobs)
        return value, {"kl": masked_mean(jax.lax.stop_gradient(value), batch.action_mask)}

    return token_loss(apply, Need.REFERENCE)


def entropy_bonus() -> TokenLoss:
    """Minus the entropy of the learner's distribution at each token, in nats; "entropy" reports the
    mean entropy."""

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        entropy = require(scores, Need.ENTROPY)
        return -entropy, {"entropy": masked_mean(jax.lax.stop_gradient(entropy), batch.action_mask)}

    return token_loss(apply, Need.ENTROPY)


def regularized(
    policy: TokenLoss, *, kl: float, kl_estimator: KLEstimator = k3, entropy: float = 0.0
) -> TokenLoss:
    """The policy term + kl x divergence - entropy x entropy. A term whose coefficient is 0 is left
    out, and so are the scores that it needs.

    Raises:
      ValueError: for a negative KL coefficient.
    """
    if kl < 0:
        raise ValueError(f"kl={kl} would reward distance from the reference; it must be >= 0")
    loss = policy
    if kl:
        loss = loss + kl * kl_penalty(kl_estimator)
    if entropy:
        loss = loss + entropy * entropy_bonus()
    return loss
