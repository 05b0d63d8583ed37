"""Terms that hold the policy in place: KL to a frozen reference, entropy.

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
from jaxrl.losses.algebra import Need, Scores, TokenLoss, require, token_loss
from jaxrl.losses.ratios import LOG_RATIO_LIMIT, Ratio


class KLEstimator(Protocol):
    """log-ratio reference - learner f32[B, T] -> estimate per token f32[B, T]."""

    def __call__(self, d: jax.Array, /) -> jax.Array:
        """Differentiable in d."""
        ...


def k1(d: jax.Array) -> jax.Array:
    """-d, f32[B, T]: unbiased, of either sign. As a loss its gradient is zero in expectation."""
    return -d


def k2(d: jax.Array) -> jax.Array:
    """d^2 / 2, f32[B, T]: biased, never negative."""
    return d**2 / 2


def k3(d: jax.Array) -> jax.Array:
    """e^d - d - 1, f32[B, T]: unbiased, never negative; d clamped to +-20 and the result to 10."""
    d = jnp.clip(d, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return jnp.minimum(jnp.expm1(d) - d, 10.0)


def k1_plus(d: jax.Array) -> jax.Array:
    """The value of k1 with the gradient of k2, f32[B, T]."""
    return _value_and_gradient(k1(d), k2(d))


def k3_plus(d: jax.Array) -> jax.Array:
    """The value of k3 with the gradient of k2, f32[B, T]."""
    return _value_and_gradient(k3(d), k2(d))


def _value_and_gradient(value: jax.Array, gradient: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(value) + (gradient - jax.lax.stop_gradient(gradient))


def kl_penalty(estimator: KLEstimator = k3, *, ratio: Ratio | None = None) -> TokenLoss:
    """Divergence of the learner from the reference, per token; "kl/reference" reports its
    mean.

    With a `ratio` the estimate is multiplied by it, gradient included, which makes it unbiased for
    tokens that another policy sampled (DeepSeek-V3.2, arXiv:2512.02556).
    """

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        value = estimator(require(scores, Need.REFERENCE) - scores.logprobs)
        if ratio is not None:
            value = ratio.value(scores, batch) * value
        mean = masked_mean(jax.lax.stop_gradient(value), batch.action_mask)
        return value, {"kl/reference": mean}

    needs = frozenset({Need.REFERENCE})
    return TokenLoss(needs if ratio is None else needs | ratio.needs, apply)


def drift_penalty(ratio: Ratio) -> TokenLoss:
    """(log ratio)^2: holds the learner near the ratio's other policy (prime-rl); "drift" reports
    its mean."""

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        value = jnp.clip(ratio.log(scores, batch), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) ** 2
        return value, {"drift": masked_mean(jax.lax.stop_gradient(value), batch.action_mask)}

    return TokenLoss(ratio.needs, apply)


def positive_likelihood(threshold: float = 0.0) -> TokenLoss:
    """-log pi on answers whose reward exceeds `threshold`, 0 on others: imitation of what was right
    (VAPO, arXiv:2504.05118). "nll/positive" reports its mean over the tokens of these answers.

    Raises:
      ValueError: when the loss is applied, if the batch holds no rewards.
    """

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        if batch.rewards is None:
            raise ValueError("positive_likelihood reads batch.rewards; make the batch with pack()")
        right = batch.action_mask & (batch.rewards > threshold)
        value = jnp.where(right, -scores.logprobs, 0)
        return value, {"nll/positive": masked_mean(jax.lax.stop_gradient(value), right)}

    return token_loss(apply)


def entropy_bonus() -> TokenLoss:
    """Minus the entropy of the learner's distribution at each token, in nats; "entropy" reports the
    mean entropy."""

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        entropy = require(scores, Need.ENTROPY)
        return -entropy, {"entropy": masked_mean(jax.lax.stop_gradient(entropy), batch.action_mask)}

    return token_loss(apply, Need.ENTROPY)


def adaptive_entropy_bonus() -> TokenLoss:
    """`entropy_bonus` times a coefficient that an `EntropyController` sets for each rollout.

    Raises:
      ValueError: when the loss is applied, if the batch does not hold the coefficient.
    """
    bonus = entropy_bonus()

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        if batch.entropy_weights is None:
            raise ValueError(
                "the adaptive entropy bonus reads batch.entropy_weights, and nothing has set them; "
                "the loop does so from Recipe.entropy"
            )
        value, metrics = bonus.apply(scores, batch)
        return batch.entropy_weights * value, metrics

    return token_loss(apply, Need.ENTROPY)


def load_balance() -> TokenLoss:
    """What a mixture of experts pays for using them unevenly, per token (arXiv:2101.03961, within
    sequences); "imbalance" reports its mean, which is the number of experts per token when all are
    used alike."""

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        value = require(scores, Need.IMBALANCE)
        mean = masked_mean(jax.lax.stop_gradient(value), batch.action_mask)
        return value, {"imbalance": mean}

    return token_loss(apply, Need.IMBALANCE)


@dataclass(frozen=True, kw_only=True)
class EntropyController:
    """Raises the coefficient of the entropy bonus while the policy's entropy is below a target, and
    lowers it while it is above (Skywork-OR1, arXiv:2505.22312).

    Attributes:
      initial: the first coefficient.
      target: entropy, nats per token.
      step: how far the coefficient moves after each rollout; it stays in [0, 1].

    Raises:
      ValueError: for a number out of range.
    """

    initial: float = 0.0
    target: float = 0.2
    step: float = 0.005

    def __post_init__(self) -> None:
        bounds.fraction("entropy", self.initial)
        bounds.positive("entropy_target", self.target)
        bounds.positive("entropy_step", self.step)

    def next(self, coefficient: float, *, entropy: float) -> float:
        """The coefficient after a rollout whose mean entropy was `entropy`."""
        move = self.step if entropy < self.target else -self.step
        return min(max(coefficient + move, 0.0), 1.0)
