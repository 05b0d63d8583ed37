"""Reward models: scoring of sampled token ids, and training on preference pairs."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from jaxrl.core.batch import Minibatch
from jaxrl.core.metrics import Metrics
from jaxrl.core.precision import Precision
from jaxrl.learner.update import LearnerState, make_forward, make_update
from jaxrl.losses.preference import pair_count, ranked
from jaxrl.models.model import Model
from jaxrl.models.scorer import sequence_scores
from jaxrl.models.spec import Params

ScoreRows = Callable[[Params, Minibatch], jax.Array]
"""(parameters, minibatch of N rows) -> f32[N, T + 1]: the scores of each row's sequences."""


def make_scores(
    model: Model, *, precision: Precision | str, param_shardings: Any = None
) -> ScoreRows:
    """Builds the function that scores batches with a scorer, to be compiled by the caller; for the
    arguments see `make_update`."""
    precision = Precision.of(precision)
    return make_forward(
        functools.partial(sequence_scores, model, precision=precision),
        precision=precision,
        param_shardings=param_shardings,
    )


class Ranker(NamedTuple):
    """The learner of a reward model: pure functions, as in `policy.Learner`."""

    init: Callable[[Params], LearnerState]
    step: Callable[[LearnerState, Minibatch], tuple[LearnerState, Metrics]]


def make_ranker(
    model: Model,
    *,
    center_rewards: float,
    optimizer: optax.GradientTransformation,
    precision: Precision | str,
    param_shardings: Any = None,
) -> Ranker:
    """Builds the learner of a scorer. `center_rewards` is an argument of
    `preference.bradley_terry`, the others of `make_update`."""
    precision = Precision.of(precision)
    update = make_update(optimizer=optimizer, precision=precision, param_shardings=param_shardings)

    def total(weights: Params, minibatch: Minibatch) -> tuple[jax.Array, Metrics]:
        scores = sequence_scores(model, weights, minibatch.batch, precision=precision)
        return ranked(scores, minibatch.batch, center_rewards=center_rewards)

    def step(state: LearnerState, minibatch: Minibatch) -> tuple[LearnerState, Metrics]:
        return update.step(state, minibatch, total, denominator=pair_count(minibatch.batch))

    return Ranker(update.init, step)
