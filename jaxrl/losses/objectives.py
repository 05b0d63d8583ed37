"""Objectives: sums of losses, each reduced to one number over the whole batch.

Sums run over the tokens of a microbatch; denominators and choices of tokens belong to the whole
batch. An objective therefore does not depend on how a batch is cut.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxrl.core.batch import TokenBatch
from jaxrl.core.metrics import Metrics
from jaxrl.losses.algebra import Clip, TokenLoss, Weights, applied, chosen_before, merged
from jaxrl.losses.formulas import Formula, formula_text, grouped
from jaxrl.losses.scores import Need, Scores


@dataclass(frozen=True, repr=False)
class Aggregation(Formula):
    """The reduction of per-token losses to one number: sum(weights * loss) / denominator.

    Both depend on the batch alone, never on scores, so the denominator of the whole batch over all
    devices is known before the first microbatch.
    """

    weights: Callable[[TokenBatch], jax.Array]  # f32[B, T], 0 where the loss is not read
    denominator: Callable[[TokenBatch], jax.Array]  # f32[]


@dataclass(frozen=True, repr=False)
class Objective(Formula):
    """The quantity that a learner minimises: a loss and its one reduction, made by `objective`, and
    further objectives that are added, each with its own reduction.

    Example:
      >>> from jaxrl.losses import positive_likelihood, reinforce, token_mean
      >>> objective(reinforce(), token_mean) + 0.1 * positive_likelihood()
      objective(reinforce(), token_mean) + 0.1 * positive_likelihood(0.0)
    """

    loss: TokenLoss
    aggregation: Aggregation
    among: Weights | None = None  # tokens of weight 0 are in no sum and in no denominator
    others: "tuple[Objective, ...]" = ()

    def __repr__(self) -> str:
        among = "" if self.among is None else f", among={self.among!r}"
        first = self.formula or f"objective({self.loss!r}, {self.aggregation!r}{among})"
        return " + ".join([first, *map(repr, self.others)])

    def __add__(self, term: "TokenLoss | Objective") -> "Objective":
        if isinstance(term, Objective):
            first = dataclasses.replace(term, others=())
            return dataclasses.replace(self, others=(*self.others, first, *term.others))
        return dataclasses.replace(self, loss=self.loss + term, formula="")

    def __sub__(self, term: "TokenLoss | Objective") -> "Objective":
        if isinstance(term, Objective):
            return self + -1 * term
        return dataclasses.replace(self, loss=self.loss - term, formula="")

    def __mul__(self, factor: float) -> "Objective":
        formula = f"{formula_text(factor)} * {grouped(dataclasses.replace(self, others=()))}"
        others = tuple(factor * other for other in self.others)
        loss = factor * self.loss
        return dataclasses.replace(self, loss=loss, others=others, formula=formula)

    __rmul__ = __mul__

    @property
    def whole(self) -> tuple[Weights, ...]:
        """The weights of the whole batch, computed before its microbatches."""
        own: dict[str, Weights] = {}
        for need in self._declared:
            if isinstance(need, Weights):
                same = own.setdefault(repr(need), need) == need
                if not same and "Weights(" in repr(need):  # calls of a constructor make the same
                    raise ValueError(f"two weights of the whole batch print as {need!r}; name one")
        return tuple(own[name] for name in sorted(own))

    @property
    def step_needs(self) -> frozenset[Need]:
        """The scores that the differentiated loss reads."""
        return frozenset(need for need in self._declared if isinstance(need, Need))

    @property
    def survey_needs(self) -> frozenset[Need]:
        """The scores that the weights of the whole batch read."""
        read = (need for weights in self.whole for need in weights.needs)
        return frozenset(need for need in read if isinstance(need, Need))

    @property
    def needs(self) -> frozenset[Need]:
        """All scores that the objective reads."""
        return self.step_needs | self.survey_needs

    @property
    def clips(self) -> frozenset[Clip]:
        """The clips that rounding alone may reach."""
        return self.loss.clips.union(*(other.clips for other in self.others))

    @property
    def _declared(self) -> frozenset[Need | Weights]:
        own = self.loss.needs | (frozenset() if self.among is None else {self.among})
        return own.union(*(other._declared for other in self.others))

    def survey(self, scores: Scores, batch: TokenBatch) -> tuple[Scores, Metrics]:
        """Returns the scores of a whole batch with `whole` filled in, and its metrics."""
        found, metrics = {}, {}
        for weights in self.whole:
            found[repr(weights)], more = applied(weights, scores, batch)
            metrics = merged(metrics, more)
        return dataclasses.replace(scores, whole=jax.lax.stop_gradient(found)), metrics

    def total(
        self, scores: Scores, batch: TokenBatch, *, denominators: Sequence[jax.Array] | None = None
    ) -> tuple[jax.Array, Metrics]:
        """Returns f32[], the weighted sum over this microbatch, and metrics. Divided by the first
        denominator, or by 1 if that is 0, and added up over the microbatches it is the loss.

        `denominators` belong to the whole batch; without them this batch is the whole one.

        Raises:
          ValueError: if the loss, or a part of it, is not one number for each token.
        """
        if denominators is None:
            denominators = self.denominators(batch, scores.whole)
        counted = self._counted(batch, scores.whole)
        value, metrics = applied(self.loss, scores, counted)
        weights = self.aggregation.weights(counted)
        # Select before multiplying: 0 * inf at a token outside the mask would poison the sum.
        total = jnp.sum(jnp.where(weights != 0, value, 0) * weights)
        # A first reduction without tokens is divided by 1, so that the others keep their size.
        first, *counts = (jnp.where(count > 0, count, 1) for count in denominators)
        for other, count in zip(self.others, counts, strict=True):
            value, more = other.total(scores, batch, denominators=[count])
            total = total + value * (first / count)
            metrics = merged(metrics, more)
        return total, metrics

    def denominators(
        self, batch: TokenBatch, whole: Mapping[str, jax.Array] | None = None
    ) -> list[jax.Array]:
        """Returns f32[] for each reduction, of the whole batch; 0 for one without tokens. `whole`
        holds the weights of the whole batch, if there are any."""
        own = self.aggregation.denominator(self._counted(batch, whole))
        return [own, *(d for other in self.others for d in other.denominators(batch, whole))]

    def denominator(self, batch: TokenBatch) -> jax.Array:
        """Returns the first denominator, which divides `total`."""
        return self.denominators(batch)[0]

    def _counted(self, batch: TokenBatch, whole: Mapping[str, jax.Array] | None) -> TokenBatch:
        if self.among is None:
            return batch
        kept = chosen_before(self.among, whole) != 0
        return dataclasses.replace(batch, action_mask=batch.action_mask & kept)


def objective(
    loss: TokenLoss, aggregation: Aggregation, *, among: Weights | None = None
) -> Objective:
    """Reduces a loss, once. Terms may still be added to the result, and other objectives.

    Args:
      loss: one number per token.
      aggregation: its reduction.
      among: rejections, computed over the whole batch. Rejected tokens leave the batch: the sums,
        the denominators and the means over sequences (as in veRL).

    Example:
      >>> from jaxrl.losses import one_sequence, reinforce, token_mean
      >>> goal = objective(reinforce(), token_mean)
      >>> scores, batch = one_sequence(advantages=[1, 2], logprobs=-1)
      >>> goal.total(scores, batch)[0] / goal.denominator(batch)
      Array(-1.5, dtype=float32)

    Raises:
      TypeError: if an argument has another type, such as a loss that is reduced already.
      ValueError: if `among` contains weights of the whole batch, which it is itself.
    """
    if not isinstance(loss, TokenLoss):
        raise TypeError(
            f"objective: {formula_text(loss)} is not a TokenLoss; write a loss such as "
            "clipped(over_sampler); aggregation happens once, on the sum of all terms"
        )
    if not isinstance(aggregation, Aggregation):
        raise TypeError(
            f"objective: {formula_text(aggregation)} is not an Aggregation; write one such as "
            "token_mean or fixed_length(1024)"
        )
    if among is not None and not isinstance(among, Weights):
        raise TypeError(
            f"objective: among={formula_text(among)} is not Weights; write a rejection such as "
            "vetoed(anchor_over_sampler)"
        )
    if among is not None and any(isinstance(need, Weights) for need in among.needs):
        raise ValueError(
            f"objective: among={among} is computed over the whole batch anyway; leave whole_batch "
            "out"
        )
    return Objective(loss, aggregation, among)
