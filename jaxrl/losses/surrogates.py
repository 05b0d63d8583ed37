"""Surrogates: policy terms made of a ratio and an advantage, one loss per token.

The examples compare the learner with the sampler on a token or two.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch
from jaxrl.core.metrics import Metrics, masked_means
from jaxrl.losses import bounds
from jaxrl.losses.algebra import Clip, Shift, TokenLoss, token_loss
from jaxrl.losses.formulas import with_formula
from jaxrl.losses.ratios import Ratio, geometric, missing, on_policy, per_token
from jaxrl.losses.scores import Scores


class SurrogateFn(Protocol):
    """(ratio, advantages), both f32[B, T] -> loss per token f32[B, T]."""

    def __call__(self, ratio: jax.Array, advantages: jax.Array, /) -> jax.Array:
        """Must be differentiable in the ratio."""


class MarksFn(Protocol):
    """(ratio, advantages) -> named arrays [B, T], reported as means over action tokens."""

    def __call__(self, ratio: jax.Array, advantages: jax.Array, /) -> Mapping[str, jax.Array]:
        """Marks tokens, for example those that are clipped."""


@with_formula
def surrogate(fn: SurrogateFn, ratio: Ratio, *, marks: MarksFn | None = None) -> TokenLoss:
    """Makes a policy term from a function of ratio and advantage.

    Reports, over action tokens, "ratio/mean", "ratio/kl" (the estimate E[r - 1 - log r] of the
    divergence of the learner from the ratio's other policy), "ratio/missing" where the ratio reads
    the sampler's log-probs, and `marks`.

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> def saturating(r, advantages):
      ...     return -advantages * r / (1 + r)
      >>> loss = surrogate(saturating, over_sampler)
      >>> scores, batch = one_sequence(advantages=[1, -3], logprobs=-1, sampler=-1)
      >>> print(loss, loss.apply(scores, batch)[0])
      surrogate(saturating, over_sampler) [[-0.5  1.5]]
    """

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        r = ratio.value(scores, batch)
        reports = {"ratio/mean": r, "ratio/kl": r - 1 - jnp.log(r)}
        if marks is not None:
            reports |= marks(jax.lax.stop_gradient(r), batch.advantages)
        metrics = masked_means(reports, batch.action_mask)
        return fn(r, batch.advantages), metrics | missing(ratio, batch, name="ratio/missing")

    return TokenLoss(ratio.needs, apply, ratio.weighted)


@with_formula
def unclipped(ratio: Ratio) -> TokenLoss:
    """-r A: the importance-weighted policy gradient, unbounded.

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> scores, batch = one_sequence(advantages=[2], logprobs=-0.5, sampler=-1)
      >>> f"{unclipped(over_sampler).apply(scores, batch)[0].item():.3f}"  # -2 e^0.5
      '-3.297'
    """
    return surrogate(lambda r, advantages: -r * advantages, ratio)


@with_formula
def reinforce() -> TokenLoss:
    """-A exp(lp - sg(lp)): the value -A with the gradient of -A log pi (Williams 1992).

    Example:
      >>> from jaxrl.losses import one_sequence
      >>> scores, batch = one_sequence(advantages=[1, -2], logprobs=[-1, -0.5], sampler=-1)
      >>> print(reinforce().apply(scores, batch)[0])
      [[-1.  2.]]
    """
    return unclipped(on_policy)


@with_formula
def likelihood() -> TokenLoss:
    """-A log pi: the gradient of `reinforce`, with the usual value of policy gradients with fixed
    weights (CISPO, VESPO, PG-Seq-IS): `weights * likelihood()`.

    Example:
      >>> from jaxrl.losses import one_sequence
      >>> scores, batch = one_sequence(advantages=[1, -2], logprobs=[-1, -0.5])
      >>> print(likelihood().apply(scores, batch)[0])
      [[ 1. -1.]]
    """
    return token_loss(lambda scores, batch: (-batch.advantages * scores.logprobs, {}))


@with_formula
def clipped(
    ratio: Ratio,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    cap: float | None = None,
) -> TokenLoss:
    """PPO's surrogate (arXiv:1707.06347): -min(r A, clip(r, 1 - low, 1 + high) A).

    Reports also "clip/low" (share of action tokens with A < 0 and r < 1 - low, which get no
    gradient), "clip/high" (A > 0 and r > 1 + high) and, if switched on, "clip/dual" and "clip/cap".

    Args:
      ratio: the policies that are compared.
      low: the ratio pays down to 1 - low; in [0, 1].
      high: the ratio pays up to 1 + high; larger than `low` in clip-higher (DAPO,
        arXiv:2503.14476).
      dual: where A < 0 the loss is at most -dual A (dual clip, arXiv:1912.09729); usually 3.
      cap: the ratio is replaced by min(r, cap) first, which bounds the loss where A < 0 but stops
        its gradient there (INTELLECT-2, arXiv:2505.07291); usually 4.

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=[-1, -0.5], sampler=-1)
      >>> print(clipped(over_sampler, high=0.28).apply(scores, batch)[0])
      [[-1.   -1.28]]

    Raises:
      ValueError: for a range that does not hold 1, or a `dual` or `cap` inside it.
    """
    if not (0 <= low <= 1 and high >= 0):
        raise ValueError(f"clipped: low={low} must lie in [0, 1] and high={high} must be >= 0")
    for name, bound in (("dual", dual), ("cap", cap)):
        if bound is not None and not bound > 1 + high:
            raise ValueError(f"clipped: {name}={bound} must exceed 1 + high = {1 + high}")

    def fn(r: jax.Array, advantages: jax.Array) -> jax.Array:
        free = r if cap is None else jnp.minimum(r, cap)
        bounded = jnp.clip(free, 1 - low, 1 + high)
        loss = jnp.maximum(-free * advantages, -bounded * advantages)
        if dual is None:
            return loss
        return jnp.where(advantages < 0, jnp.minimum(loss, -dual * advantages), loss)

    def marks(r: jax.Array, advantages: jax.Array) -> Mapping[str, jax.Array]:
        shares = {
            "clip/low": (advantages < 0) & (r < 1 - low),
            "clip/high": (advantages > 0) & (r > 1 + high),
        }
        if dual is not None:
            shares["clip/dual"] = (advantages < 0) & (r > dual)
        if cap is not None:
            shares["clip/cap"] = (advantages < 0) & (r > cap)
        return shares

    return _clipping(surrogate(fn, ratio, marks=marks), ratio, Clip(low, high, ratio.unit))


@with_formula
def soft_gated(ratio: Ratio, *, positive: float = 1.0, negative: float = 1.05) -> TokenLoss:
    """SAPO's surrogate (arXiv:2511.20347): -sigmoid(tau (r - 1)) 4 / tau A, which fades where a
    clip cuts; tau is `positive` where A > 0 and `negative` elsewhere.

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> for logprob in (-1, -0.5, 9):  # the gate saturates at 4
      ...     scores, batch = one_sequence(advantages=[1], logprobs=logprob, sampler=-1)
      ...     print(f"{soft_gated(over_sampler).apply(scores, batch)[0].item():.3f}")
      -2.000
      -2.627
      -4.000

    Raises:
      ValueError: for a temperature that is not positive.
    """
    bounds.positive("soft_gated: positive", positive)
    bounds.positive("soft_gated: negative", negative)

    def fn(r: jax.Array, advantages: jax.Array) -> jax.Array:
        tau = jnp.where(advantages > 0, positive, negative)
        return -jax.nn.sigmoid(tau * (r - 1)) * (4 / tau) * advantages

    return surrogate(fn, ratio)


@with_formula
def geometric_clipped(ratio: Ratio, *, low: float = 0.4, high: float = 0.4) -> TokenLoss:
    """GMPO's surrogate (arXiv:2507.20673): -R A, where R is the geometric mean of a sequence's
    ratios. Each ratio is first bounded on the side on which it would pay: by e^high where A > 0, by
    e^-low where A < 0. Reports also "clip/low" and "clip/high", the shares of bounded tokens.

    Example:
      >>> from jaxrl.losses import one_sequence, over_sampler
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=[-1, -0.5], sampler=-1)
      >>> loss = geometric_clipped(over_sampler, high=0.4)
      >>> f"{loss.apply(scores, batch)[0][0, 0]:.3f}"  # -exp((0 + 0.4) / 2)
      '-1.221'

    Raises:
      ValueError: for a negative bound, or the ratio of whole sequences.
    """
    per_token(ratio, reader="geometric_clipped")
    bounds.not_negative("geometric_clipped: low", low)
    bounds.not_negative("geometric_clipped: high", high)

    def log(scores: Scores, batch: TokenBatch) -> jax.Array:
        d = ratio.log(scores, batch)
        return jnp.where(batch.advantages < 0, jnp.maximum(d, -low), jnp.minimum(d, high))

    mean = unclipped(geometric(dataclasses.replace(ratio, log=log)))

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        loss, metrics = mean.apply(scores, batch)
        d = ratio.log(scores, batch)
        shares = {
            "clip/low": (batch.advantages < 0) & (d < -low),
            "clip/high": (batch.advantages > 0) & (d > high),
        }
        return loss, metrics | masked_means(shares, batch.action_mask)

    loss = TokenLoss(mean.needs, apply, mean.weighted)
    return _clipping(loss, ratio, Clip(-math.expm1(-low), math.expm1(high)))


def _clipping(loss: TokenLoss, ratio: Ratio, clip: Clip) -> TokenLoss:
    """Notes the clip of a loss, unless its ratio leaves the sampler out."""
    return dataclasses.replace(
        loss, clips=frozenset({clip} if Shift.MISMATCH in ratio.weighted else ())
    )
