"""Losses as values: pure functions of scores, added and scaled like numbers.

A `TokenLoss` maps log-probabilities to one loss per token. It never sees a model and never reduces.
It declares the scores that it needs, and the learner computes no others. `objectives.objective`
pairs it with its one aggregation.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch
from jaxrl.core.metrics import Metrics
from jaxrl.losses import operands
from jaxrl.losses.formulas import Formula, formula_text, grouped, with_formula
from jaxrl.losses.scores import Need, Scores


class Shift(enum.StrEnum):
    """A change of policy that an importance weight accounts for; in a product at most once."""

    UPDATE = "update"  # from the anchor to the learner
    MISMATCH = "mismatch"  # from the sampler to the anchor


TermFn = Callable[[Scores, TokenBatch], tuple[jax.Array, Metrics]]
"""Losses or weights per token of a microbatch, f32[B, T], and metrics. Entries outside
`batch.action_mask` are ignored, but must be finite where the inputs are."""


@dataclass(frozen=True, repr=False)
class Term(Formula):
    """One number per token, from the scores of a microbatch: the base of losses and of weights."""

    # The scores, beyond the learner's log-probs, that `apply` reads, and weights of a whole batch.
    needs: "frozenset[Need | Weights]"
    apply: TermFn
    weighted: frozenset[Shift] = frozenset()  # shifts that its importance weights account for

    __array_ufunc__ = None  # numpy must leave products with a term to the term's own methods


Unit = Literal["token", "mean", "product"]
"""Unit of a ratio: each token, the geometric mean over a sequence, or the product over it."""


class Clip(NamedTuple):
    """A clip whose ratio contains the mismatch of learner and sampler."""

    low: float  # the ratio pays down to 1 - low
    high: float  # the ratio pays up to 1 + high
    unit: Unit = "token"

    def __str__(self) -> str:
        bounds = f"{1 - self.low:.6g} to {1 + self.high:.6g}"
        return bounds if self.unit == "token" else f"{bounds}, {self.unit} of a sequence"


@dataclass(frozen=True, repr=False)
class TokenLoss(Term):
    """A loss before its reduction. It prints as its formula.

    Example:
      >>> from jaxrl.losses import clipped, entropy_bonus, kl_penalty, over_sampler
      >>> clipped(over_sampler) + 0.001 * (kl_penalty() - entropy_bonus())
      clipped(over_sampler, low=0.2, high=0.2) + 0.001 * (kl_penalty(k3) - entropy_bonus())
    """

    clips: frozenset[Clip] = frozenset()  # that rounding alone may reach

    def __add__(self, other: "TokenLoss") -> "TokenLoss":
        return add(self, other)

    def __radd__(self, other: int) -> "TokenLoss":
        if isinstance(other, int) and other == 0:  # sum() begins with 0
            return self
        return add(_loss(other), self)

    def __sub__(self, other: "TokenLoss") -> "TokenLoss":
        difference = add(self, -_loss(other))
        return dataclasses.replace(difference, formula=f"{self!r} - {grouped(other, signs='+-')}")

    def __rsub__(self, other: Any) -> "TokenLoss":
        return add(_loss(other), -self)

    def __neg__(self) -> "TokenLoss":
        return dataclasses.replace(scale(self, -1), formula=f"-{grouped(self)}")

    def __mul__(self, factor: "float | Weights") -> "TokenLoss":
        return reweight(self, factor) if isinstance(factor, Weights) else scale(self, factor)

    def __rmul__(self, factor: float) -> "TokenLoss":
        return scale(self, factor)

    def __truediv__(self, divisor: float) -> "TokenLoss":
        quotient = scale(self, 1 / operands.number(divisor))
        return dataclasses.replace(quotient, formula=f"{grouped(self)} / {formula_text(divisor)}")


def token_loss(apply: TermFn, *needs: Need) -> TokenLoss:
    """Makes a loss from a function and the scores that it reads. It prints as the function's name.

    Example:
      >>> def likely(scores, batch):
      ...     return -scores.logprobs, {}
      >>> 0.1 * token_loss(likely)
      0.1 * likely
    """
    return TokenLoss(frozenset(needs), apply, formula=formula_text(apply))


def add(*losses: TokenLoss) -> TokenLoss:
    """Adds losses: `a + b`, `sum([a, b])`.

    Example:
      >>> from jaxrl.losses import kl_penalty, load_balance, reinforce
      >>> sum([reinforce(), 0.001 * kl_penalty(), 0.01 * load_balance()])
      reinforce() + 0.001 * kl_penalty(k3) + 0.01 * load_balance()

    Raises:
      TypeError: for anything else, such as a number or `Weights`.
      ValueError: when the loss is applied, if two terms report the same metric; `prefix` one of
        them.
    """
    losses = tuple(_loss(loss) for loss in losses)

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        total, metrics = jnp.zeros_like(scores.logprobs), {}
        for loss in losses:
            value, more = applied(loss, scores, batch)
            total, metrics = total + value, merged(metrics, more)
        return total, metrics

    return TokenLoss(
        frozenset().union(*(loss.needs for loss in losses)),
        apply,
        frozenset().union(*(loss.weighted for loss in losses)),
        frozenset().union(*(loss.clips for loss in losses)),
        formula=" + ".join(map(repr, losses)),
    )


def scale(loss: TokenLoss, factor: float) -> TokenLoss:
    """Multiplies a loss by a constant: `0.1 * loss`. Its metrics stay as they are.

    Example:
      >>> from jaxrl.losses import kl_penalty
      >>> 0.5 * kl_penalty(), -kl_penalty(), kl_penalty() / 8
      (0.5 * kl_penalty(k3), -kl_penalty(k3), kl_penalty(k3) / 8)

    Raises:
      TypeError: for a factor that is not one number.
    """
    loss, factor = _loss(loss, operation="multiply"), operands.number(factor)

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        value, metrics = loss.apply(scores, batch)
        return factor * value, metrics

    return dataclasses.replace(
        loss, apply=apply, formula=f"{formula_text(factor)} * {grouped(loss)}"
    )


class Weights(Term):
    """Factors of a policy term, one per token, such as the corrections of `losses.corrections`.

    `weights * loss` is `reweight`, which lets no gradient through; `weights * weights` is `both`.

    Example:
      >>> from jaxrl.losses import anchor_over_sampler, clipped, over_anchor, truncated, vetoed
      >>> w = anchor_over_sampler
      >>> vetoed(w) * truncated(w, high=2) * clipped(over_anchor)
      vetoed(anchor_over_sampler, low=0.0001, high=inf) * truncated(anchor_over_sampler, low=0.0,
      high=2) * clipped(over_anchor, low=0.2, high=0.2)
    """

    def __mul__(self, other: Any) -> Any:
        return both(self, other) if isinstance(other, Weights) else reweight(other, self)

    def __rmul__(self, other: Any) -> Any:
        return reweight(other, self)

    def __add__(self, other: Any) -> Any:
        raise TypeError(operands.mistake("add", other, to=self))

    __radd__ = __sub__ = __rsub__ = __add__


P = ParamSpec("P")
T = TypeVar("T", bound=Term)


def prefix(term: T, text: str) -> T:
    """Puts `text` in front of the names of the metrics of a loss, or of weights.

    Example:
      >>> from jaxrl.losses import over_sampler, prefix, reinforce, unclipped
      >>> reinforce() + 0.5 * prefix(unclipped(over_sampler), "second/")
      reinforce() + 0.5 * prefix(unclipped(over_sampler), 'second/')
    """

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        value, metrics = term.apply(scores, batch)
        return value, {text + name: metric for name, metric in metrics.items()}

    return dataclasses.replace(term, apply=apply, formula=f"prefix({term!r}, {text!r})")


def reweight(loss: TokenLoss, weights: Weights) -> TokenLoss:
    """Multiplies a loss by `weights`, token by token: `weights * loss`. Add a KL term afterwards.

    A weight of 0 removes the token from the sum and leaves the denominator as it is.

    Example:
      >>> from jaxrl.losses import anchor_over_sampler, kl_penalty, over_anchor, unclipped, within
      >>> within(anchor_over_sampler, high=2) * unclipped(over_anchor) + 0.1 * kl_penalty()
      within(anchor_over_sampler, low=0.0, high=2) * unclipped(over_anchor) + 0.1 * kl_penalty(k3)

    Raises:
      TypeError: for anything but a loss and weights.
      ValueError: if both account for the same change of policy, which would count it twice; or,
        when the loss is applied, if both report the same metric.
    """
    if not (isinstance(loss, TokenLoss) and isinstance(weights, Weights)):
        other = loss if isinstance(weights, Weights) else weights
        raise TypeError(operands.mistake("multiply", other, to=weights if other is loss else loss))

    def multiply(value: jax.Array, factors: jax.Array) -> jax.Array:
        factors = jax.lax.stop_gradient(factors)
        # Select first: 0 times a removed token's infinity or NaN would be NaN.
        return jnp.where(factors != 0, value, 0) * factors

    return _product(loss, weights, multiply=multiply)


def both(first: Weights, second: Weights) -> Weights:
    """Multiplies two weights, such as a correction and a rejection: `first * second`.

    Example:
      >>> from jaxrl.losses import masked, over_sampler, vetoed
      >>> masked(over_sampler, high=2) * vetoed(over_sampler, low=0.01)
      masked(over_sampler, low=0.0, high=2) * vetoed(over_sampler, low=0.01, high=inf)

    Raises:
      TypeError: for anything but weights.
      ValueError: as `reweight`.
    """
    for weights, other in ((first, second), (second, first)):
        if not isinstance(weights, Weights):
            raise TypeError(operands.mistake("multiply", weights, to=other))
    return _product(second, first, multiply=jnp.multiply)


def _product(
    term: T, weights: Weights, *, multiply: Callable[[jax.Array, jax.Array], jax.Array]
) -> T:
    if twice := sorted(term.weighted & weights.weighted):
        raise ValueError(
            f"an importance ratio accounts for the {' and the '.join(twice)} already, and the "
            "weights would count it again (update: anchor to learner; mismatch: sampler to "
            "anchor). Correct with anchor_over_sampler a loss whose ratio is over_anchor, or with "
            "over_sampler one whose ratio is on_policy; in a config, loss.correction goes with "
            "loss.ratio = 'over_anchor'"
        )

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        value, metrics = applied(term, scores, batch)
        factors, more = applied(weights, scores, batch)
        return multiply(value, factors), merged(metrics, more)

    return dataclasses.replace(
        term,
        needs=term.needs | weights.needs,
        apply=apply,
        weighted=term.weighted | weights.weighted,
        formula=f"{weights!r} * {grouped(term)}",
    )


def _loss(operand: Any, *, operation: str = "add") -> TokenLoss:
    if not isinstance(operand, TokenLoss):
        raise TypeError(operands.mistake(operation, operand, to="a loss"))
    return operand


def whole_batch(weights: Weights) -> Weights:
    """Weights computed over all tokens of a batch at once, before it is divided into microbatches:
    for choices that a microbatch cannot make, such as the tokens of highest entropy.

    They cost another forward pass, which reports their metrics.

    Example:
      >>> from jaxrl.losses import over_sampler, within
      >>> whole_batch(within(over_sampler, high=2))
      whole_batch(within(over_sampler, low=0.0, high=2))

    Raises:
      ValueError: for weights that contain such weights already.
    """
    if any(isinstance(need, Weights) for need in weights.needs):
        raise ValueError(f"whole_batch: {weights} contains weights of the whole batch already")

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        return chosen_before(weights, scores.whole), {}

    return Weights(frozenset({weights}), apply, weights.weighted, formula=f"whole_batch({weights})")


def of_whole_batch(make: Callable[P, Weights]) -> Callable[P, Weights]:
    """Lifts a constructor of weights to weights of the whole batch, which print as its call."""
    named = with_formula(make)

    @functools.wraps(make)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Weights:
        weights = named(*args, **kwargs)
        return dataclasses.replace(whole_batch(weights), formula=repr(weights))

    return wrapper


def chosen_before(weights: Weights, whole: Mapping[str, jax.Array] | None) -> jax.Array:
    """Returns weights of the whole batch at the tokens of a microbatch, f32[B, T]; raises
    ValueError if they were not computed."""
    if whole is None or repr(weights) not in whole:
        raise ValueError(
            f"{weights} is computed over the whole batch, and scores.whole does not hold it; "
            "a learner fills it, and so does objective.survey(scores, batch)"
        )
    return whole[repr(weights)]


def applied(term: Term, scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
    """Applies a term; raises ValueError if it does not return one number per token and a dict of
    metrics."""
    found = term.apply(scores, batch)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
        got = "an array" if isinstance(found, jax.Array) else type(found).__name__
        raise ValueError(
            f"`apply` returned {got}, expected a pair: one number per token, and a dict of metrics "
            "(`return loss, {}` without any)"
        )
    value, metrics = found
    if jnp.shape(value) != scores.logprobs.shape:
        # A sum, or a number for each row, would be broadcast silently, with a different gradient.
        what = "the loss has" if isinstance(term, TokenLoss) else "the weights have"
        raise ValueError(
            f"{what} shape {jnp.shape(value)}, expected one number per token "
            f"{scores.logprobs.shape}; do not reduce: loss.aggregation does, once"
        )
    return value, metrics


def merged(metrics: Metrics, more: Metrics) -> Metrics:
    """Merges the metrics of two terms; raises ValueError if both report the same one."""
    if twice := sorted(metrics.keys() & more.keys()):
        raise ValueError(
            f"two terms report the metric {twice[0]!r}; prefix(term, 'name/') tells them apart"
        )
    return metrics | more
