"""The drift of a mismatched sampler, as a share of the policy gradient (arXiv:2609.20807)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxrl.core.batch import Minibatch
from jaxrl.core.loss_scale import LossScaleSpec
from jaxrl.core.precision import Precision
from jaxrl.learner.policy import make_learner
from jaxrl.losses.aggregation import token_sum
from jaxrl.losses.algebra import TokenLoss
from jaxrl.losses.centering import score_centering
from jaxrl.losses.objectives import objective
from jaxrl.losses.surrogates import reinforce
from jaxrl.models.model import Model


def make_drift(
    model: Model, *, precision: Precision | str, **options: Any
) -> Callable[[Any, Minibatch], jax.Array]:
    """Builds a function (params, minibatch) -> f32[], to be compiled with `jaxrl.jit`: the norm of
    the sum of A E_q[grad log p] over the action tokens, divided by that of A grad log p.

    q is the distribution of the published weights in the sampler's dtypes, and the mean is over the
    whole vocabulary (`score_centering`). It is 0 if learner and sampler compute alike, up to
    rounding; 1 means a drift as large as the gradient; NaN if a gradient is not finite. It costs
    two backward passes and the shadow's forward pass. `options` are further ones of `make_learner`.
    """
    # A sum over tokens is thousands of times the mean that a loss scale is made for.
    precision = dataclasses.replace(Precision.of(precision), loss_scale=LossScaleSpec())

    def norm(loss: TokenLoss) -> Callable[[Any, Minibatch], jax.Array]:
        learner = make_learner(
            model,
            objective(loss, token_sum),
            optimizer=optax.sgd(0.0),
            precision=precision,
            **options,
        )

        def apply(params: Any, minibatch: Minibatch) -> jax.Array:
            found = learner.step(learner.init(params), minibatch)[1]["grad_norm"]
            return found.total / found.weight

        return apply

    drift, whole = norm(score_centering()), norm(reinforce())

    def share(params: Any, minibatch: Minibatch) -> jax.Array:
        size = whole(params, minibatch)
        return drift(params, minibatch) / jax.numpy.where(size == 0, 1, size)

    return share
