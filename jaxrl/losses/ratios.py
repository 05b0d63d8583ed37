"""Importance ratios of two policies, at the level of tokens or sequences.

Three policies have names: the learner (being differentiated), the anchor (the learner at the start
of the update) and the sampler (it produced the tokens and reported their log-probs). A ratio
over the sampler ("bypass") sees both the update and the mismatch between the two programs; a ratio
over the anchor ("decoupled") sees the update alone.

A token whose sampler log-prob is NaN has the log-ratio 0, with the learner's gradient; the metric
"ratio/missing" is the share of such tokens.

Example:
  >>> from jaxrl.losses import one_sequence
  >>> scores, batch = one_sequence(advantages=[1], logprobs=-1, anchor=-1.5, sampler=-1.75)
  >>> for ratio in (on_policy, over_anchor, over_sampler, anchor_over_sampler):
  ...     print(f"{ratio.value(scores, batch).item():.3f} {ratio}")
  1.000 on_policy
  1.649 over_anchor
  2.117 over_sampler
  1.284 anchor_over_sampler
  >>> scores = scores.replace(shadow=scores.logprobs - 0.25)  # as the sampler's dtypes have it
  >>> f"{shadowed.value(scores, batch).item():.3f} {shadowed}"
  '1.649 shadowed'
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch, segment_sum
from jaxrl.core.metrics import Metrics, masked_mean
from jaxrl.losses.algebra import Shift, Unit
from jaxrl.losses.formulas import Formula, with_formula
from jaxrl.losses.scores import Need, Scores, require

LOG_RATIO_LIMIT = 20.0
"""Bound of a log-ratio before exp: e^20 is far beyond any clip, and its square is finite."""

_SEQUENCE_LIMIT = 10.0


@dataclass(frozen=True, repr=False)
class Ratio(Formula):
    """An importance ratio. It prints as its formula.

    Its logarithm is f32[B, T], not clamped; entries outside `batch.action_mask` are ignored.

    Example:
      >>> product(over_sampler)
      product(over_sampler)
    """

    log: Callable[[Scores, TokenBatch], jax.Array]
    weighted: frozenset[Shift]  # the shifts of policy that it accounts for
    needs: frozenset[Need] = frozenset()  # the scores, beyond the learner's log-probs, for `log`
    unit: Unit = "token"  # of a sequence: one number, found at each of its tokens

    def clamped(self, scores: Scores, batch: TokenBatch) -> jax.Array:
        """Returns the log-ratio clamped to +-20, f32[B, T]; the gradient is 0 where clamped."""
        return jnp.clip(self.log(scores, batch), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def value(self, scores: Scores, batch: TokenBatch) -> jax.Array:
        """Returns exp(clamped log-ratio), f32[B, T]."""
        return jnp.exp(self.clamped(scores, batch))


def _on_policy(scores: Scores, batch: TokenBatch) -> jax.Array:
    logprobs = _wide(scores.logprobs)
    return logprobs - jax.lax.stop_gradient(logprobs)


def _over_anchor(scores: Scores, batch: TokenBatch) -> jax.Array:
    return _wide(scores.logprobs) - _wide(require(scores, Need.ANCHOR))


def _over_sampler(scores: Scores, batch: TokenBatch) -> jax.Array:
    logprobs = _wide(scores.logprobs)
    return logprobs - _sampler(batch, otherwise=jax.lax.stop_gradient(logprobs))


def _anchor_over_sampler(scores: Scores, batch: TokenBatch) -> jax.Array:
    anchor = _wide(require(scores, Need.ANCHOR))
    return anchor - _sampler(batch, otherwise=anchor)


def _shadowed(scores: Scores, batch: TokenBatch) -> jax.Array:
    shadow = _wide(require(scores, Need.SHADOW))
    return _on_policy(scores, batch) + (shadow - _sampler(batch, otherwise=shadow))


def _sampler(batch: TokenBatch, *, otherwise: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(batch.sampler_logprobs), otherwise, batch.sampler_logprobs)


def _wide(logprobs: jax.Array) -> jax.Array:
    # A log-ratio is a small difference of large numbers: never form it in 16 bits.
    return logprobs.astype(jnp.promote_types(logprobs.dtype, jnp.float32))


_BOTH = frozenset({Shift.UPDATE, Shift.MISMATCH})

on_policy = Ratio(_on_policy, frozenset(), formula="on_policy")
"""1, with the gradient of the learner's log-prob: update and mismatch are both ignored."""

over_anchor = Ratio(
    _over_anchor, frozenset({Shift.UPDATE}), frozenset({Need.ANCHOR}), formula="over_anchor"
)
"""learner / anchor: the change of the policy by this update (PPO's ratio, arXiv:1707.06347)."""

over_sampler = Ratio(_over_sampler, _BOTH, formula="over_sampler")
"""learner / sampler: the true importance ratio, mismatch of the two programs included."""

anchor_over_sampler = Ratio(
    _anchor_over_sampler,
    frozenset({Shift.MISMATCH}),
    frozenset({Need.ANCHOR}),
    formula="anchor_over_sampler",
)
"""anchor / sampler: the mismatch alone, without gradient; the ratio of corrections."""

shadowed = Ratio(_shadowed, _BOTH, frozenset({Need.SHADOW}), formula="shadowed")
"""The value of (learner in the sampler's dtypes) / sampler, with the gradient of the training
forward pass: a clip then acts on real updates only, not on rounding."""


class Level(Protocol):
    """The ratio of tokens -> the ratio at another level: `token`, `sequence`, `geometric`,
    `product`."""

    def __call__(self, ratio: Ratio, /) -> Ratio:
        """Takes any ratio of tokens."""


def token(ratio: Ratio) -> Ratio:
    """The ratio of each token, unchanged.

    Example:
      >>> token(over_sampler)
      over_sampler
    """
    return ratio


@with_formula
def product(ratio: Ratio) -> Ratio:
    """The ratio of whole sequences, at each of their tokens: the product over action tokens; the
    gradient goes through the product to every token.

    Example:
      >>> from jaxrl.losses import one_sequence
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=-1, sampler=[-1.5, -1.25])
      >>> product(over_sampler).log(scores, batch)
      Array([[0.75, 0.75]], dtype=float32)

    Raises:
      ValueError: as do the other levels, if the ratio is of whole sequences already.
    """
    per_token(ratio, reader="product")

    def log(scores: Scores, batch: TokenBatch) -> jax.Array:
        return sequence_sum(ratio.log(scores, batch), batch)

    return Ratio(log, ratio.weighted, ratio.needs, unit="product")


@with_formula
def geometric(ratio: Ratio) -> Ratio:
    """The geometric mean of the ratio over the action tokens of a sequence, at each of them; the
    gradient goes through the mean to every token (the form of GSPO in TRL, OpenRLHF and NeMo).

    Example:
      >>> from jaxrl.losses import one_sequence
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=-1, sampler=[-1.5, -1.25])
      >>> geometric(over_sampler).log(scores, batch)
      Array([[0.375, 0.375]], dtype=float32)
    """
    per_token(ratio, reader="geometric")

    def log(scores: Scores, batch: TokenBatch) -> jax.Array:
        return sequence_mean(ratio.log(scores, batch), batch)

    return Ratio(log, ratio.weighted, ratio.needs, unit="mean")


@with_formula
def sequence(ratio: Ratio) -> Ratio:
    """GSPO's ratio (arXiv:2507.18071): the value of `geometric`, its logarithm at most 10, and at
    each token the gradient of that token's own log-prob (the form of veRL and SkyRL). If all tokens
    of a sequence have one advantage and one weight, the gradient equals the one of `geometric`.

    Example:
      >>> from jaxrl.losses import one_sequence
      >>> scores, batch = one_sequence(advantages=[1, 1], logprobs=-1, sampler=[-1.5, -1.25])
      >>> first_token = lambda logprobs: log.log(scores.replace(logprobs=logprobs), batch)[0, 0]
      >>> for log in (sequence(over_sampler), geometric(over_sampler)):
      ...     print(log, jax.grad(first_token)(scores.logprobs))
      sequence(over_sampler) [[1. 0.]]
      geometric(over_sampler) [[0.5 0.5]]
    """
    per_token(ratio, reader="sequence")

    def log(scores: Scores, batch: TokenBatch) -> jax.Array:
        mean = sequence_mean(ratio.log(scores, batch), batch)
        mean = jax.lax.stop_gradient(jnp.minimum(mean, _SEQUENCE_LIMIT))
        return _on_policy(scores, batch) + mean

    return Ratio(log, ratio.weighted, ratio.needs, unit="mean")


def per_token(ratio: Ratio, *, reader: str) -> None:
    """Raises ValueError if `reader`, which reads ratios of tokens, is given one of sequences."""
    if ratio.unit != "token":
        raise ValueError(
            f"{reader}: {ratio} is of whole sequences already; {reader} reads the ratio of each "
            "token, such as over_sampler"
        )


def sequence_mean(values: jax.Array, batch: TokenBatch) -> jax.Array:
    """Computes the mean over the action tokens of each sequence, at each token: f32[B, T]."""
    count = segment_sum(batch.action_mask.astype(values.dtype), batch.segments)
    return sequence_sum(values, batch) / jnp.maximum(count, 1)


def sequence_sum(values: jax.Array, batch: TokenBatch) -> jax.Array:
    """Computes the sum over the action tokens of each sequence, at each token: f32[B, T]."""
    return segment_sum(jnp.where(batch.action_mask, values, 0), batch.segments)


def missing(ratio: Ratio, batch: TokenBatch, *, name: str) -> Metrics:
    """Reports the share of action tokens without a sampler log-prob, for a ratio that reads it."""
    if Shift.MISMATCH not in ratio.weighted:
        return {}
    return {name: masked_mean(jnp.isnan(batch.sampler_logprobs), batch.action_mask)}
