"""Losses as values: pure functions of scores, added and scaled like numbers.

A `TokenLoss` maps log-probabilities to one loss per token. It never sees a model, never reduces,
and says which scores it needs, so that the learner computes these and no others. `objective` pairs
it with the one aggregation of the run.
"""

import dataclasses
import enum
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxrl.core.batch import TokenBatch
from jaxrl.core.metrics import Metrics


class Need(enum.StrEnum):
    """A score that costs something and is computed only when a loss needs it."""

    ENTROPY = "entropy"  # of the learner's distribution at each token
    ANCHOR = "anchor"  # log-probs of the learner at the start of the update
    SHADOW = "shadow"  # log-probs of the same weights in the sampler's dtypes
    REFERENCE = "reference"  # log-probs of the frozen reference model
    VALUES = "values"  # what a critic expects before each token
    IMBALANCE = "imbalance"  # how unevenly the learner's routers use their experts


@struct.dataclass(kw_only=True)
class Scores:
    """What a loss may look at; entry t scores tokens[:, t] given the tokens before it.

    Only `logprobs`, `entropy`, `values` and `imbalance` carry a gradient. A score that no loss
    needs is None.
    """

    logprobs: jax.Array  # f32[B, T], the learner
    entropy: jax.Array | None = None  # f32[B, T], nats
    anchor: jax.Array | None = None  # f32[B, T]
    shadow: jax.Array | None = None  # f32[B, T]
    reference: jax.Array | None = None  # f32[B, T]
    values: jax.Array | None = None  # f32[B, T], of a critic, differentiable
    imbalance: jax.Array | None = None  # f32[B, T], see `models.experts.imbalance`


def require(scores: Scores, need: Need) -> jax.Array:
    """The score that a loss declared to need, f32[B, T].

    Raises:
      ValueError: if it was not computed; the message names it.
    """
    value = getattr(scores, need.value)
    if value is None:
        raise ValueError(
            f"the loss reads scores.{need.value}, which was not computed: declare Need.{need.name} "
            "where the loss is made, and see that the learner was built with this objective"
        )
    return value


class Shift(enum.StrEnum):
    """A change of policy that an importance weight accounts for; a product may account for each
    only once."""

    UPDATE = "update"  # from the anchor to the learner
    MISMATCH = "mismatch"  # from the sampler to the anchor


class TokenLossFn(Protocol):
    """Per-token loss f32[B, T] and metrics. Entries outside `batch.action_mask` are ignored, but
    must be finite where the inputs are."""

    def __call__(self, scores: Scores, batch: TokenBatch, /) -> tuple[jax.Array, Metrics]:
        """Of a microbatch."""
        ...


@dataclass(frozen=True)
class TokenLoss:
    """A loss before its reduction.

    Attributes:
      needs: the scores, beyond the learner's log-probs, that `apply` reads.
      apply: the per-token loss and its metrics.
      weighted: the shifts that the loss already carries an importance weight for.
    """

    needs: frozenset[Need]
    apply: TokenLossFn
    weighted: frozenset[Shift] = frozenset()

    def __add__(self, other: "TokenLoss") -> "TokenLoss":
        return add(self, other)

    def __radd__(self, other: int) -> "TokenLoss":
        return self if other == 0 else add(_loss(other), self)  # sum() begins with 0

    def __sub__(self, other: "TokenLoss") -> "TokenLoss":
        return add(self, scale(other, -1))

    def __neg__(self) -> "TokenLoss":
        return scale(self, -1)

    def __mul__(self, factor: float) -> "TokenLoss":
        return scale(self, factor)

    def __rmul__(self, factor: float) -> "TokenLoss":
        return scale(self, factor)

    def __truediv__(self, divisor: float) -> "TokenLoss":
        return scale(self, 1 / _number(divisor))


def token_loss(apply: TokenLossFn, *needs: Need) -> TokenLoss:
    """Makes a loss from a function and the scores that it reads."""
    return TokenLoss(frozenset(needs), apply)


def add(*losses: TokenLoss) -> TokenLoss:
    """The sum of losses.

    Raises:
      TypeError: for anything else, such as a number or `Weights`.
      ValueError: when the loss is applied, if two terms report a metric of one name; `prefix` one
        of them.
    """
    losses = tuple(_loss(loss) for loss in losses)

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        total, metrics = jnp.zeros_like(scores.logprobs), {}
        for loss in losses:
            value, more = _applied(loss, scores, batch)
            total, metrics = total + value, _merged(metrics, more)
        return total, metrics

    return TokenLoss(
        frozenset().union(*(loss.needs for loss in losses)),
        apply,
        frozenset().union(*(loss.weighted for loss in losses)),
    )


def scale(loss: TokenLoss, factor: float) -> TokenLoss:
    """The loss times a constant; its metrics stay as they are.

    Raises:
      TypeError: for a factor that is not one number.
    """
    loss, factor = _loss(loss), _number(factor)

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        value, metrics = loss.apply(scores, batch)
        return factor * value, metrics

    return TokenLoss(loss.needs, apply, loss.weighted)


def _loss(operand: Any) -> TokenLoss:
    if not isinstance(operand, TokenLoss):
        raise TypeError(f"a loss is added to a loss, or subtracted from one; got {operand!r}")
    return operand


def _number(operand: Any) -> Any:
    on_device = isinstance(operand, jax.Array) and operand.ndim == 0
    if not on_device and not isinstance(operand, numbers.Real):
        raise TypeError(
            f"a loss is multiplied or divided by a number, got {operand!r}; "
            "reweight(loss, weights) multiplies by Weights"
        )
    return operand


@dataclass(frozen=True)
class Weights:
    """Factors for a policy term, such as the corrections of `losses.corrections`.

    Attributes:
      needs: the scores, beyond the learner's log-probs, that `apply` reads.
      apply: (scores, batch) -> f32[B, T] factors and metrics; `reweight` lets no gradient through.
      weighted: the shifts that the factors account for; none for a mask of zeros and ones.
    """

    needs: frozenset[Need]
    apply: TokenLossFn
    weighted: frozenset[Shift] = frozenset()


Term = TypeVar("Term", TokenLoss, Weights)


def prefix(term: Term, text: str) -> Term:
    """The same loss, or the same weights, with `text` in front of the names of its metrics."""

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        value, metrics = term.apply(scores, batch)
        return value, {text + name: metric for name, metric in metrics.items()}

    return dataclasses.replace(term, apply=apply)


def reweight(loss: TokenLoss, weights: Weights) -> TokenLoss:
    """The loss times `weights`, token by token. A KL term is added afterwards, never reweighted.

    A weight of 0 removes the token from the sum and leaves the denominator as it is.

    Raises:
      ValueError: if both account for the same change of policy, which would count it twice; also,
        when the loss is applied, if both report a metric of one name.
    """
    _refuse_double_counting(loss.weighted, weights.weighted)

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        value, metrics = _applied(loss, scores, batch)
        factors, more = _applied(weights, scores, batch)
        factors = jax.lax.stop_gradient(factors)
        # Select first: a removed token must not bring its infinity or its NaN along.
        return jnp.where(factors != 0, value, 0) * factors, _merged(metrics, more)

    return TokenLoss(loss.needs | weights.needs, apply, loss.weighted | weights.weighted)


def both(first: Weights, second: Weights) -> Weights:
    """The product of two factors, such as a correction and a rejection.

    Raises:
      ValueError: as `reweight`.
    """
    _refuse_double_counting(first.weighted, second.weighted)

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        factors, metrics = _applied(first, scores, batch)
        others, more = _applied(second, scores, batch)
        return factors * others, _merged(metrics, more)

    return Weights(first.needs | second.needs, apply, first.weighted | second.weighted)


def _applied(
    term: TokenLoss | Weights, scores: Scores, batch: TokenBatch
) -> tuple[jax.Array, Metrics]:
    found = term.apply(scores, batch)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
        got = "an array" if isinstance(found, jax.Array) else type(found).__name__
        raise ValueError(
            f"`apply` returned {got}, expected a pair: one number per token, and a dict of metrics "
            "(`return loss, {}` without any)"
        )
    value, metrics = found
    if jnp.shape(value) != scores.logprobs.shape:
        # A sum, or a number for each row, would be broadcast without a word, and its gradient is
        # another one.
        what = "the loss has" if isinstance(term, TokenLoss) else "the weights have"
        raise ValueError(
            f"{what} shape {jnp.shape(value)}, expected one number per token "
            f"{scores.logprobs.shape}; do not reduce: loss.aggregation does, once"
        )
    return value, metrics


def _refuse_double_counting(first: frozenset[Shift], second: frozenset[Shift]) -> None:
    if twice := sorted(first & second):
        raise ValueError(
            f"an importance ratio accounts for the {' and the '.join(twice)} already, and the "
            "weights would count it again (update: anchor to learner; mismatch: sampler to "
            "anchor). Correct with anchor_over_sampler a loss whose ratio is over_anchor, or with "
            "over_sampler one whose ratio is on_policy; in a config, loss.correction goes with "
            "loss.ratio = 'over_anchor'"
        )


def _merged(metrics: Metrics, more: Metrics) -> Metrics:
    if twice := sorted(metrics.keys() & more.keys()):
        raise ValueError(
            f"two terms report the metric {twice[0]!r}; prefix(term, 'name/') tells them apart"
        )
    return metrics | more


class Aggregation(NamedTuple):
    """How per-token losses become one number: sum(weights * loss) / denominator.

    Both depend on the batch alone, never on scores, so the denominator is known before the first
    microbatch and is that of the whole batch over all devices.
    """

    weights: Callable[[TokenBatch], jax.Array]  # f32[B, T], 0 outside action_mask
    denominator: Callable[[TokenBatch], jax.Array]  # f32[]


@dataclass(frozen=True)
class Objective:
    """What a learner minimises: a loss and its one reduction; made by `objective`."""

    loss: TokenLoss
    aggregation: Aggregation

    @property
    def needs(self) -> frozenset[Need]:
        """As in `TokenLoss`."""
        return self.loss.needs

    def total(self, scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        """(f32[], the weighted sum over this microbatch; metrics).

        Raises:
          ValueError: if the loss, or a part of it, is not one number for each token.
        """
        value, metrics = _applied(self.loss, scores, batch)
        weights = self.aggregation.weights(batch)
        # Select before multiplying: 0 * inf at a token outside the mask would poison the sum.
        return jnp.sum(jnp.where(weights != 0, value, 0) * weights), metrics

    def denominator(self, batch: TokenBatch) -> jax.Array:
        """f32[], of the whole batch; 0 for one without action tokens, whose total is 0 too."""
        return self.aggregation.denominator(batch)


def objective(loss: TokenLoss, aggregation: Aggregation) -> Objective:
    """Reduces a loss, once.

    Raises:
      TypeError: if `loss` is reduced already.
    """
    if not isinstance(loss, TokenLoss):
        raise TypeError(
            f"objective() takes a TokenLoss, got {type(loss).__name__}; aggregation happens once, "
            "on the sum of all terms"
        )
    return Objective(loss, aggregation)
