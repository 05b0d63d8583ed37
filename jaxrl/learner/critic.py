"""PPO's critic: a decoder whose head predicts the reward of a completion, trained with the policy.

It has its own parameters and optimizer; `jaxrl.learner.actor_critic` combines it with the learner.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl.core.batch import Minibatch, TokenBatch
from jaxrl.core.metrics import Metrics
from jaxrl.core.precision import Precision
from jaxrl.learner.update import LearnerState, make_forward, make_update
from jaxrl.losses.scores import Scores
from jaxrl.losses.value import Critic
from jaxrl.models.model import Model
from jaxrl.models.scorer import token_scores, token_values
from jaxrl.models.spec import Params


class CriticLearner(NamedTuple):
    """Pure functions, to be compiled by the caller or used as they come.

    Attributes:
      init: params -> state before the first step.
      values: (params, minibatch) -> f32[N, T, 2], the critic's values without gradient: before each
        action token, 0 elsewhere, and after each token, 0 at padding.
      step: (state, minibatch) -> (state, metrics); reads `batch.values` and `batch.returns`. Metric
        names begin with "value/".
    """

    init: Callable[[Params], LearnerState]
    values: Callable[[Params, Minibatch], jax.Array]
    step: Callable[[LearnerState, Minibatch], tuple[LearnerState, Metrics]]


def make_critic(
    model: Model,
    recipe: Critic,
    *,
    optimizer: optax.GradientTransformation,
    precision: Precision | str,
    param_shardings: Any = None,
) -> CriticLearner:
    """Builds a critic from a scorer (`config.scored` is true) and the critic's loss; for the other
    arguments see `make_update`."""
    precision = Precision.of(precision)
    values_of = functools.partial(critic_values, model, precision=precision)
    around = functools.partial(values_around, model, precision=precision)
    values = make_forward(around, precision=precision, param_shardings=param_shardings)
    update = make_update(optimizer=optimizer, precision=precision, param_shardings=param_shardings)

    def total(weights: Params, minibatch: Minibatch) -> tuple[jax.Array, Metrics]:
        return value_total(recipe, values_of(weights, minibatch.batch), batch=minibatch.batch)

    def step(state: LearnerState, minibatch: Minibatch) -> tuple[LearnerState, Metrics]:
        denominator = recipe.objective.denominator(minibatch.batch)
        state, metrics = update.step(state, minibatch, total, denominator=denominator)
        return state, named(metrics)

    return CriticLearner(update.init, values, step)


def critic_values(
    model: Model, weights: Params, batch: TokenBatch, *, precision: Precision
) -> jax.Array:
    """Computes a scorer's values of a batch, differentiable, f32[B, T]; `weights` are in
    `precision.compute`."""
    hidden = model.hidden_of(weights, batch, precision=precision)
    return token_values(hidden, model.unembedding(weights), batch, precision=precision)


def values_around(
    model: Model, weights: Params, batch: TokenBatch, *, precision: Precision
) -> jax.Array:
    """Computes `CriticLearner.values` of a batch, f32[B, T, 2]; for the arguments see
    `critic_values`."""
    hidden = model.hidden_of(weights, batch, precision=precision)
    head = model.unembedding(weights)
    after = jnp.where(batch.segments > 0, token_scores(hidden, head, precision=precision), 0)
    return jnp.stack([token_values(hidden, head, batch, precision=precision), after], axis=-1)


def value_total(
    recipe: Critic, values: jax.Array, *, batch: TokenBatch
) -> tuple[jax.Array, Metrics]:
    """Computes the critic's loss, summed over a microbatch, and metrics from values f32[B, T]."""
    return recipe.objective.total(Scores(logprobs=jnp.zeros_like(values), values=values), batch)


def named(metrics: Metrics) -> Metrics:
    """Prefixes the metric names of a critic's step with "value/"."""
    return {f"value/{name.removeprefix('value/')}": metric for name, metric in metrics.items()}
