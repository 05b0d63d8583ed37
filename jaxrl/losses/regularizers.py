"""Regularizers: terms that keep the policy near a reference, or its entropy up.

KL estimators (Schulman, "Approximating KL divergence") are functions of d = reference - learner,
the log-ratio at a sampled token. `k1` and `k3` estimate the divergence; the gradient of `k2` is
that of the divergence, while the gradient of `k1` is zero in expectation. `k1_plus` and `k3_plus`
take the value from one and the gradient from the other.
"""

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch
from jaxrl.core.metrics import Metrics, masked_mean
from jaxrl.losses import bounds
from jaxrl.losses.algebra import TokenLoss, token_loss
from jaxrl.losses.formulas import with_formula
from jaxrl.losses.ratios import LOG_RATIO_LIMIT, Ratio
from jaxrl.losses.scores import Need, Scores, require


class KLEstimator(Protocol):
    """log-ratio reference - learner f32[B, T] -> estimate per token f32[B, T]."""

    def __call__(self, d: jax.Array, /) -> jax.Array:
        """Differentiable in d."""
        ...


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


@with_formula
def drift_penalty(ratio: Ratio) -> TokenLoss:
    """(log ratio)^2: holds the learner near the ratio's other policy (prime-rl); "drift" reports
    its mean.

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=[-1, -0.5], sampler=-1)
      >>> drift_penalty(over_sampler).apply(scores, batch)[0]
      Array([[0.  , 0.25]], dtype=float32)
    """

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        value = jnp.clip(ratio.log(scores, batch), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) ** 2
        return value, {"drift": masked_mean(value, batch.action_mask)}

    return token_loss(apply, *ratio.needs)


@with_formula
def positive_likelihood(threshold: float = 0.0) -> TokenLoss:
    """-log pi on completions whose reward exceeds `threshold`, 0 on others: imitation of successes
    (VAPO, arXiv:2504.05118). "nll/positive" reports its mean over the tokens of these completions.

    Example:
      >>> from jaxrl.losses import one_sequence
      >>> for reward in (1, 0):
      ...     scores, batch = one_sequence(advantages=[1, 1], logprobs=[-1, -0.5], rewards=reward)
      ...     print(positive_likelihood().apply(scores, batch)[0])
      [[1.  0.5]]
      [[0. 0.]]

    Raises:
      ValueError: when the loss is applied, if the batch holds no rewards.
    """

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        if batch.rewards is None:
            raise ValueError(
                "positive_likelihood: batch.rewards is None; make the batch with pack()"
            )
        right = batch.action_mask & (batch.rewards > threshold)
        value = jnp.where(right, -scores.logprobs, 0)
        return value, {"nll/positive": masked_mean(value, right)}

    return token_loss(apply)


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
def adaptive_entropy_bonus() -> TokenLoss:
    """`entropy_bonus` times a coefficient that an `EntropyController` sets for each rollout.

    Example:
      >>> from jaxrl.losses import one_sequence
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=-1, entropy=[0.5, 2])
      >>> batch = batch.replace(entropy_weights=jnp.full((1, 2), 0.1))
      >>> adaptive_entropy_bonus().apply(scores, batch)[0]
      Array([[-0.05, -0.2 ]], dtype=float32)

    Raises:
      ValueError: when the loss is applied, if the batch does not hold the coefficient.
    """
    bonus = entropy_bonus()

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        if batch.entropy_weights is None:
            raise ValueError(
                "adaptive_entropy_bonus: batch.entropy_weights is None; write "
                "with_terms(recipe, entropy_target=0.2), which has the loop set them"
            )
        value, metrics = bonus.apply(scores, batch)
        return batch.entropy_weights * value, metrics

    return token_loss(apply, Need.ENTROPY)


@with_formula
def load_balance() -> TokenLoss:
    """The price of an uneven use of experts, per token (arXiv:2101.03961, within sequences);
    "imbalance" reports its mean, which is the number of experts per token when all are used alike.

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


@dataclass(frozen=True, kw_only=True)
class EntropyController:
    """Raises the coefficient of the entropy bonus while the policy's entropy is below a target, and
    lowers it while it is above (Skywork-OR1, arXiv:2505.22312).

    Example:
      >>> controller = EntropyController(target=0.5, step=0.25)
      >>> controller.next(0.5, entropy=0.3), controller.next(0.5, entropy=0.7)
      (0.75, 0.25)

    Raises:
      ValueError: for a number out of range.
    """

    initial: float = 0.0  # the first coefficient; all stay in [0, 1]
    target: float = 0.2  # entropy, nats per token
    step: float = 0.005  # change of the coefficient after each rollout

    def __post_init__(self) -> None:
        bounds.fraction("entropy", self.initial)
        bounds.positive("entropy_target", self.target)
        bounds.positive("entropy_step", self.step)

    def next(self, coefficient: float, *, entropy: float) -> float:
        """Returns the coefficient after a rollout whose mean entropy was `entropy`."""
        move = self.step if entropy < self.target else -self.step
        return min(max(coefficient + move, 0.0), 1.0)
