"""Reward models: scoring of sampled token ids, and training on preference pairs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from jaxrl.core.batch import Minibatch, TokenBatch
from jaxrl.core.casts import cast
from jaxrl.core.metrics import Metrics
from jaxrl.core.precision import Precision
from jaxrl.learner.policy import LearnerState
from jaxrl.learner.update import by_microbatch, constrainer, make_update
from jaxrl.losses.preference import pair_count, ranked
from jaxrl.models.decoder import Model
from jaxrl.models.scorer import sequence_scores
from jaxrl.models.spec import Params

# (parameters, minibatch of N rows) -> f32[N, T + 1]: the score of each row's sequences 1, 2, ...
Scores = Callable[[Params, Minibatch], jax.Array]


def make_scores(
    model: Model, *, precision: Precision, rows_per_microbatch: int, param_shardings: Any = None
) -> Scores:
    """Builds the function that scores batches, to be compiled by the caller.

    Args:
      model: a scorer.
      precision: the dtype policy; parameters are cast to `compute`.
      rows_per_microbatch: rows that are computed at once; divides the rows of every minibatch.
      param_shardings: tree of shardings that the cast parameters keep; None on a single device.
    """
    constrain = constrainer(param_shardings)

    def one(weights: Params, batch: TokenBatch) -> jax.Array:
        return sequence_scores(model, weights, batch, precision=precision)

    def scores(params: Params, minibatch: Minibatch) -> jax.Array:
        weights = constrain(cast(params, precision.compute))
        return by_microbatch(one, rows_per_microbatch=rows_per_microbatch)(weights, minibatch)

    return scores


class Ranker(NamedTuple):
    """The learner of a reward model: pure functions, as in `policy.Learner`."""

    init: Callable[[Params], LearnerState]
    step: Callable[[LearnerState, Minibatch], tuple[LearnerState, Metrics]]


def make_ranker(
    model: Model,
    *,
    center_rewards: float,
    optimizer: optax.GradientTransformation,
    precision: Precision,
    rows_per_microbatch: int,
    param_shardings: Any = None,
) -> Ranker:
    """Builds the learner of a reward model.

    Args:
      model: a scorer.
      center_rewards: as in `preference.bradley_terry`.
      optimizer: any optax transformation.
      precision: the dtype policy.
      rows_per_microbatch: rows that are computed at once; divides the rows of every minibatch.
      param_shardings: tree of shardings of the parameters; None on a single device.
    """

    def total(weights: Params, minibatch: Minibatch, fixed: None) -> tuple[jax.Array, Metrics]:
        del fixed
        batch = minibatch.batch
        scores = sequence_scores(model, weights, batch, precision=precision)
        return ranked(scores, batch, center_rewards=center_rewards)

    update = make_update(
        total,
        optimizer=optimizer,
        precision=precision,
        rows_per_microbatch=rows_per_microbatch,
        param_shardings=param_shardings,
    )

    def step(state: LearnerState, minibatch: Minibatch) -> tuple[LearnerState, Metrics]:
        return update.step(
            state,
            minibatch,
            fixed=None,
            denominator=pair_count(minibatch.batch),
        )

    return Ranker(update.init, step)
