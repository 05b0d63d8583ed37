"""A gate that takes an update only if the policy that is served does not get worse by it.

"The Mirage of Optimizing Training Policies" (MIPU, arXiv:2606.29526): a step that improves the
learner's policy may lower the reward of the same weights in the sampler's numerics.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl.core.batch import Minibatch
from jaxrl.core.metrics import Mean, Metrics, masked_mean
from jaxrl.learner.policy import Learner
from jaxrl.learner.update import LearnerState
from jaxrl.losses.ratios import LOG_RATIO_LIMIT
from jaxrl.models import lora

Step = Callable[[LearnerState, Minibatch], tuple[LearnerState, Metrics]]


def gated(learner: Learner) -> Step:
    """Returns `learner.step` with a gate: it keeps parameters and moments of the old state if the
    served policy's objective falls on the minibatch.

    The objective is the mean over the tokens of A exp(shadow - sampler), log-ratios clamped to
    +-20, estimated for both states on the minibatch that the step was taken on. The shadow is of
    the published weights in the sampler's dtypes. Tokens whose sampler reported no log-prob are
    left out. A step that the gate refuses counts as a step, for the learning rate too. The gate
    costs two forward passes and, while a step is computed, a second copy of the state.

    Its step adds the metrics "update/rejected": 1 for a refused step, and "update/gain": the
    difference of the objective, in units of the advantage.
    """

    def step(state: LearnerState, minibatch: Minibatch) -> tuple[LearnerState, Metrics]:
        new, metrics = learner.step(state, minibatch)
        gain = _gain(learner, minibatch, before=state, after=new)
        taken = gain.total >= 0  # False for NaN

        def keep(after: jax.Array, before: jax.Array) -> jax.Array:
            return jnp.where(taken, after, before)

        def kept_state(after: Any, before: Any) -> Any:
            return after if _scheduled(after) else keep(after, before)

        trained = jax.tree.map(keep, lora.trainable(new.params), lora.trainable(state.params))
        kept = dataclasses.replace(
            new,
            params=lora.with_trainable(new.params, trained),
            opt_state=jax.tree.map(kept_state, new.opt_state, state.opt_state, is_leaf=_scheduled),
        )
        rejected = Mean((~taken).astype(jnp.float32), jnp.float32(1))
        return kept, metrics | {"update/rejected": rejected, "update/gain": gain}

    return step


def _scheduled(state: Any) -> bool:
    """Tells if a part of an optimizer's state counts the steps of a learning-rate schedule."""
    return isinstance(state, optax.ScaleByScheduleState)


def _gain(
    learner: Learner, minibatch: Minibatch, *, before: LearnerState, after: LearnerState
) -> Mean:
    batch = minibatch.batch
    known = batch.action_mask & ~jnp.isnan(batch.sampler_logprobs)
    sampler = jnp.where(known, batch.sampler_logprobs, 0)

    def ratio(state: LearnerState) -> jax.Array:
        d = jnp.where(known, learner.shadow_scores(state.params, minibatch)[0] - sampler, 0)
        return jnp.exp(jnp.clip(d, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))

    return masked_mean(batch.advantages * (ratio(after) - ratio(before)), known)
