"""Minibatches of a step: rollouts with their training targets, packed, with the scores that the
loss needs."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.advantages import Advantages, estimate, explained_variance
from jaxrl.builders.learner import Learning
from jaxrl.core.batch import Minibatch, Rollout
from jaxrl.core.packing import MinibatchShape, pack_minibatch, unpack
from jaxrl.learner.actor_critic import State
from jaxrl.learner.policy import LearnerState
from jaxrl.losses.scores import Need
from jaxrl.models import lora
from jaxrl.training.rollouts.outcomes import LogProbs, Shaping, shaped_outcomes
from jaxrl.training.timing import Numbers
from sharding.transfer import fetch


class Targets(NamedTuple):
    """Training targets of rollouts: f32[C] for their tokens, or one advantage for all of them.

    Attributes:
      advantages: for the policy.
      values: the critic's predictions; None without one.
      returns: the critic's targets; None without one.
    """

    advantages: Advantages
    values: Sequence[np.ndarray] | None = None
    returns: Sequence[np.ndarray] | None = None

    def of(self, part: slice) -> "Targets":
        """Returns the targets of some rollouts."""
        values = None if self.values is None else self.values[part]
        returns = None if self.returns is None else self.returns[part]
        return Targets(self.advantages[part], values, returns)


def split_minibatches(count: int, *, updates: int) -> list[slice]:
    """Splits `count` rollouts evenly over the updates of a step; with fewer rollouts than planned,
    minibatches are smaller or fewer."""
    size = -(-count // updates)
    return [slice(i, i + size) for i in range(0, count, size)]


def compute_advantages(
    learning: Learning,
    shaping: Shaping,
    *,
    state: State,
    rollouts: Sequence[Rollout],
    parts: Sequence[slice],
) -> tuple[Targets, Numbers]:
    """Computes the advantages and, with a critic, its values and targets.

    Args:
      learning: the learner, its recipe and its critic.
      shaping: penalties on the rewards.
      state: before any update of this step.
      rollouts: with their rewards.
      parts: the rollouts of each minibatch.
    """
    recipe = learning.recipe

    def logprobs() -> tuple[LogProbs, LogProbs]:
        params = state.policy.params
        assert learning.reference is not None, "the config needs one for reward.kl"
        reference = lora.with_trainable(params, learning.reference)
        mine, theirs = (
            score_tokens(
                functools.partial(learning.learner.score, weights),
                rollouts,
                parts=parts,
                shape=learning.shape,
            )
            for weights in (params, reference)
        )
        return mine, theirs

    outcomes, numbers = shaped_outcomes(shaping, rollouts, logprobs=logprobs)
    if learning.critic is None or recipe.critic is None:
        return Targets(estimate(recipe.advantages, outcomes)), numbers
    values = score_tokens(
        functools.partial(learning.critic.values, state),
        rollouts,
        parts=parts,
        shape=learning.shape,
    )
    outcomes = dataclasses.replace(outcomes, values=values)
    returns = recipe.critic.returns(outcomes)
    numbers["value/explained_variance"] = explained_variance(returns, outcomes)
    return Targets(estimate(recipe.advantages, outcomes), values, returns), numbers


def prepare_minibatch(
    learning: Learning,
    policy: LearnerState,
    *,
    rollouts: Sequence[Rollout],
    targets: Targets,
    updates: int,
) -> Minibatch:
    """Packs a minibatch and adds the scores that the loss needs and that its update does not
    change.

    Args:
      learning: the learner and its recipe.
      policy: before any update of this step.
      rollouts: those of the minibatch.
      targets: theirs.
      updates: updates per rollout batch; with one, the anchor is the learner itself.
    """
    minibatch = pack_minibatch(
        rollouts,
        list(targets.advantages),
        shape=learning.shape,
        values=targets.values,
        returns=targets.returns,
    )
    needs, score = learning.recipe.objective.needs, learning.learner.score
    if Need.REFERENCE in needs:
        assert learning.reference is not None
        reference = lora.with_trainable(policy.params, learning.reference)
        minibatch = dataclasses.replace(minibatch, reference=score(reference, minibatch))
    if Need.ANCHOR in needs and updates > 1:
        minibatch = dataclasses.replace(minibatch, anchor=score(policy.params, minibatch))
    return minibatch


def with_entropy_weights(minibatch: Minibatch, coefficient: float) -> Minibatch:
    """Returns the minibatch with the coefficient of an adaptive entropy bonus."""
    weights = jnp.full_like(minibatch.batch.advantages, coefficient)
    batch = dataclasses.replace(minibatch.batch, entropy_weights=weights)
    return dataclasses.replace(minibatch, batch=batch)


def score_tokens(
    score: Callable[[Minibatch], jax.Array],
    rollouts: Sequence[Rollout],
    *,
    parts: Sequence[slice],
    shape: MinibatchShape,
) -> list[np.ndarray]:
    """Returns `score` of the completion tokens of each rollout, f32[C]; 0 where the policy did not
    choose the token."""
    found: list[np.ndarray] = []
    for part in parts:
        some = rollouts[part]
        minibatch = pack_minibatch(some, [0.0] * len(some), shape=shape)
        found += unpack(fetch(score(minibatch)), some, shape=shape)
    return found
