"""The critic of PPO: a decoder whose head says what an answer will earn, learnt beside the policy.

It has parameters and an optimizer of its own; like the learner it is pure functions over one state.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl.advantages import Outcomes
from jaxrl.batch import TokenBatch
from jaxrl.learner import Minibatch
from jaxrl.losses.algebra import Scores
from jaxrl.losses.value import Critic
from jaxrl.metrics import Metrics
from jaxrl.models.decoder import Model
from jaxrl.models.scorer import token_scores
from jaxrl.models.spec import Params
from jaxrl.precision import Precision, cast
from jaxrl.update import LearnerState, by_microbatch, constrainer, make_update


class CriticLearner(NamedTuple):
    """Pure functions, to be compiled by the caller or used as they come.

    Attributes:
      init: params -> state before the first step.
      values: (params, minibatch) -> f32[N, T], what the critic expects before each action token,
        without gradient; 0 elsewhere.
      step: (state, minibatch) -> (state, metrics); reads `batch.values` and `batch.returns`. The
        names of the metrics begin with "value/".
      returns: the recipe's: outcomes with values -> what the critic should have expected.
    """

    init: Callable[[Params], LearnerState]
    values: Callable[[Params, Minibatch], jax.Array]
    step: Callable[[LearnerState, Minibatch], tuple[LearnerState, Metrics]]
    returns: Callable[[Outcomes], Sequence[np.ndarray]]


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
      model: a scorer, whose `config.scored` holds.
      recipe: what is minimised, and the targets.
      optimizer: any optax transformation; it sees unscaled f32 gradients and f32 parameters.
      precision: the dtype policy.
      rows_per_microbatch: rows that are computed at once; divides the rows of every minibatch.
      param_shardings: as in `make_learner`.
    """
    constrain = constrainer(param_shardings)

    def judge(weights: Params, batch: TokenBatch) -> jax.Array:
        hidden = model.hidden(
            weights, batch.tokens, batch.positions, batch.segments, precision=precision
        )
        return token_values(hidden, model.unembedding(weights), batch, precision=precision)

    def values(params: Params, minibatch: Minibatch) -> jax.Array:
        weights = constrain(cast(params, precision.compute))
        return by_microbatch(
            judge, rows_per_microbatch=rows_per_microbatch, microbatches=minibatch.microbatches
        )(weights, minibatch.batch)

    def total(weights: Params, batch: TokenBatch, fixed: None) -> tuple[jax.Array, Metrics]:
        del fixed
        found = judge(weights, batch)
        return recipe.objective.total(Scores(logprobs=jnp.zeros_like(found), values=found), batch)

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
            minibatch.batch,
            fixed=None,
            denominator=recipe.objective.denominator(minibatch.batch),
            microbatches=minibatch.microbatches,
        )
        names = {name: f"value/{name.removeprefix('value/')}" for name in metrics}
        return state, {names[name]: metric for name, metric in metrics.items()}

    return CriticLearner(update.init, values, step, recipe.returns)


def token_values(
    hidden: jax.Array, head: jax.Array, batch: TokenBatch, *, precision: Precision
) -> jax.Array:
    """What a value head expects before each action token: its output at the token before.

    Args:
      hidden: activations[B, T, D] after the final norm.
      head: compute[1, D].
      batch: says which tokens are actions; none begins a sequence, since a prompt precedes it.
      precision: the dtype policy.

    Returns:
      f32[B, T]; 0 at all other tokens.
    """
    scores = token_scores(hidden, head, precision=precision)
    return jnp.where(batch.action_mask, jnp.roll(scores, 1, axis=1), 0)
