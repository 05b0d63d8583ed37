"""Regularizers: terms that keep the policy near a reference, or its entropy up.

KL estimators (Schulman, "Approximating KL divergence") are functions of d = reference - learner,
the log-ratio at a sampled token. `k1` and `k3` estimate the divergence and `k2` has its gradient,
while the gradient of `k1` is zero in expectation. `k1_plus` and `k3_plus` take the value from one
and the gradient from `k2`.
"""

from typing import Protocol

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch
from jaxrl.core.metrics import Metrics, masked_mean
from jaxrl.losses.algebra import TokenLoss, token_loss
from jaxrl.losses.formulas import with_formula
from jaxrl.losses.ratios import LOG_RATIO_LIMIT, Ratio
from jaxrl.losses.scores import Need, Scores, require


class KLEstimator(Protocol):
    """log-ratio reference - learner f32[B, T] -> estimate per token f32[B, T]."""

    def __call__(self, d: jax.Array, /) -> jax.Array:
        """Must be differentiable in d."""


def k1(d: jax.Array) -> jax.Array:
    """-d, f32[B, T]: unbiased, of either sign. As a loss its gradient is zero in expectation.

    Example:
      >>> print(k1(jnp.array([-0.5, 0.5])))
      [ 0.5 -0.5]
    """
    return -d


def k2(d: jax.Array) -> jax.Array:
    """d^2 / 2, f32[B, T]: biased, never negative.

    Example:
      >>> print(k2(jnp.array([-0.5, 0.5])))
      [0.125 0.125]
    """
    return d**2 / 2


def k3(d: jax.Array) -> jax.Array:
    """e^d - d - 1, f32[B, T]: unbiased, never negative; d clamped to +-20 and the result to 10.

    Example:
      >>> print(f"{k3(-0.5):.3f} {k3(0.5):.3f}")
      0.107 0.149
    """
    d = jnp.clip(d, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.minimum(jnp.expm1(d) - d, 10.0)


def k1_plus(d: jax.Array) -> jax.Array:
    """The value of k1 with the gradient of k2, f32[B, T].

    Example:
      >>> print(k1_plus(0.5), jax.grad(k1_plus)(0.5), jax.grad(k1)(0.5))
      -0.5 0.5 -1.0
    """
    return _value_and_gradient(k1(d), k2(d))


def k3_plus(d: jax.Array) -> jax.Array:
    """The value of k3 with the gradient of k2, f32[B, T].

    Example:
      >>> print(f"{k3_plus(0.5):.3f} {jax.grad(k3_plus)(0.5):.3f} {jax.grad(k3)(0.5):.3f}")
      0.149 0.500 0.649
    """
    return _value_and_gradient(k3(d), k2(d))


def _value_and_gradient(value: jax.Array, gradient: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(value) + (gradient - jax.lax.stop_gradient(gradient))


@with_formula
def kl_penalty(estimator: KLEstimator = k3, *, ratio: Ratio | None = None) -> TokenLoss:
    """Divergence of the learner from the reference, per token; "kl/reference" reports its mean.

    With a `ratio` the estimate is multiplied by it, gradient included, which makes it unbiased for
    tokens that another policy sampled (DeepSeek-V3.2, arXiv:2512.02556).

    Example:
      >>> from jaxrl.losses import one_sequence
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=[-1, -0.5], reference=-1)
      >>> (0.5 * kl_penalty(k2)).apply(scores, batch)[0]
      Array([[0.    , 0.0625]], dtype=float32)
    """

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        value = estimator(require(scores, Need.REFERENCE) - scores.logprobs)
        if ratio is not None:
            value = ratio.value(scores, batch) * value
        return value, {"kl/reference": masked_mean(value, batch.action_mask)}

    return token_loss(apply, Need.REFERENCE, *(ratio.needs if ratio else ()))


def squared(d: jax.Array) -> jax.Array:
    """d^2, f32[B, T]: twice k2.

    Example:
      >>> print(squared(jnp.array([-0.5, 0.5])))
      [0.25 0.25]
    """
    return d**2


def absolute(d: jax.Array) -> jax.Array:
    """|d|, f32[B, T], with a gradient of 1 or -1, and of 0 where d is 0.

    Example:
      >>> print(absolute(jnp.array([-0.5, 0.5])), jax.grad(absolute)(0.0))
      [0.5 0.5] 0.0
    """
    return d * jnp.sign(d)  # the gradient of jnp.abs is 1 at 0, where every first update begins


@with_formula
def drift_penalty(ratio: Ratio, estimator: KLEstimator = squared) -> TokenLoss:
    """A function of log ratio, (log ratio)^2 by default: holds the learner near the ratio's other
    policy (prime-rl); "drift" reports its mean.

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=[-1, -0.5], sampler=-1)
      >>> drift_penalty(over_sampler).apply(scores, batch)[0]
      Array([[0.  , 0.25]], dtype=float32)
    """

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        value = estimator(ratio.clamped(scores, batch))
        return value, {"drift": masked_mean(value, batch.action_mask)}

    return token_loss(apply, *ratio.needs)


@with_formula
def entropy_bonus() -> TokenLoss:
    """Minus the entropy of the learner's distribution at each token, in nats; "entropy" reports the
    mean entropy.

    Example:
      >>> from jaxrl.losses import one_sequence
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=-1, entropy=[0.5, 2])
      >>> entropy_bonus().apply(scores, batch)[0]
      Array([[-0.5, -2. ]], dtype=float32)
    """

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        entropy = require(scores, Need.ENTROPY)
        return -entropy, {"entropy": masked_mean(entropy, batch.action_mask)}

    return token_loss(apply, Need.ENTROPY)


@with_formula
def load_balance() -> TokenLoss:
    """The price of an uneven use of experts, per token (arXiv:2101.03961, within sequences);
    "imbalance" reports its mean, which is the number of experts per token under even use.

    Example:
      >>> from jaxrl.losses import one_sequence
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=-1, imbalance=[2, 3])
      >>> (0.25 * load_balance()).apply(scores, batch)[0]
      Array([[0.5 , 0.75]], dtype=float32)
    """

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        value = require(scores, Need.IMBALANCE)
        return value, {"imbalance": masked_mean(value, batch.action_mask)}

    return token_loss(apply, Need.IMBALANCE)
