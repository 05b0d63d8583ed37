"""PPO's critic: a decoder whose head predicts the reward of a completion, trained with the policy.

It has its own parameters and optimizer. Like the learner it is pure functions over one state.
`jaxrl.learner.actor_critic` combines the two.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl.core.batch import Minibatch, TokenBatch
from jaxrl.core.casts import cast
from jaxrl.core.metrics import Metrics
from jaxrl.core.precision import Precision
from jaxrl.learner.update import LearnerState, by_microbatch, constrainer, make_update
from jaxrl.losses.scores import Scores
from jaxrl.losses.value import Critic
from jaxrl.models.decoder import Model
from jaxrl.models.scorer import token_values
from jaxrl.models.spec import Params


class CriticLearner(NamedTuple):
    """Pure functions, to be compiled by the caller or used as they come.

    Attributes:
      init: params -> state before the first step.
      values: (params, minibatch) -> f32[N, T], the critic's value before each action token, without
        gradient; 0 elsewhere.
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
    precision: Precision,
    rows_per_microbatch: int,
    param_shardings: object = None,
) -> CriticLearner:
    """Builds a critic.

    Args:
      model: a scorer (`config.scored` is true).
      recipe: the critic's loss.
      optimizer: any optax transformation; it sees unscaled f32 gradients and f32 parameters.
      precision: the dtype policy.
      rows_per_microbatch: rows computed at once; divides the rows of every minibatch.
      param_shardings: as in `make_learner`.
    """
    constrain = constrainer(param_shardings)
    values_of = functools.partial(critic_values, model, precision=precision)

    def values(params: Params, minibatch: Minibatch) -> jax.Array:
        weights = constrain(cast(params, precision.compute))
        return by_microbatch(values_of, rows_per_microbatch=rows_per_microbatch)(weights, minibatch)

    def total(weights: Params, minibatch: Minibatch, fixed: None) -> tuple[jax.Array, Metrics]:
        del fixed
        batch = minibatch.batch
        return value_total(recipe, values_of(weights, batch), batch=batch)

    update = make_update(
        total,
        optimizer=optimizer,
        precision=precision,
        rows_per_microbatch=rows_per_microbatch,
        param_shardings=param_shardings,
    )

    def step(state: LearnerState, minibatch: Minibatch) -> tuple[LearnerState, Metrics]:
        state, metrics = update.step(
            state,
            minibatch,
            fixed=None,
            denominator=recipe.objective.denominator(minibatch.batch),
        )
        return state, named(metrics)

    return CriticLearner(update.init, values, step)


def critic_values(
    model: Model, weights: Params, batch: TokenBatch, *, precision: Precision
) -> jax.Array:
    """Computes the critic's values of a batch, differentiable; f32[B, T].

    Args:
      model: a scorer.
      weights: its parameters in `precision.compute`.
      batch: tokens in rows.
      precision: the dtype policy.
    """
    hidden = model.hidden_of(weights, batch, precision=precision)
    return token_values(hidden, model.unembedding(weights), batch, precision=precision)


def value_total(
    recipe: Critic, values: jax.Array, *, batch: TokenBatch
) -> tuple[jax.Array, Metrics]:
    """Computes the critic's loss, summed over a microbatch, and metrics from values f32[B, T]."""
    return recipe.objective.total(Scores(logprobs=jnp.zeros_like(values), values=values), batch)


def named(metrics: Metrics) -> Metrics:
    """Prefixes the metric names of a critic's step with "value/"."""
    return {f"value/{name.removeprefix('value/')}": metric for name, metric in metrics.items()}
