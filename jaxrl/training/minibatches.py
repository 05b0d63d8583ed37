"""Mini-batches: answers and what is learnt from each, packed, with the scores that a loss needs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.advantages import Advantages
from jaxrl.core.batch import Minibatch, Rollout
from jaxrl.core.packing import assign_rows, gather, interleave, pack
from jaxrl.learner.policy import LearnerState
from jaxrl.losses.scores import Need
from jaxrl.models import lora
from jaxrl.training.run import Run
from sharding.transfer import fetch, place


class Targets(NamedTuple):
    """What is learnt from each answer: f32[C] of its tokens, or one advantage for all of them.

    Attributes:
      advantages: for the policy.
      values: what the critic expected; None without one.
      returns: what it should have expected; None without one.
    """

    advantages: Advantages
    values: Sequence[np.ndarray] | None
    returns: Sequence[np.ndarray] | None

    def of(self, part: slice) -> "Targets":
        """Those of some answers."""
        values = None if self.values is None else self.values[part]
        returns = None if self.returns is None else self.returns[part]
        return Targets(self.advantages[part], values, returns)


def divide(run: Run, rollouts: Sequence[Rollout]) -> list[slice]:
    """The answers of each mini-batch: equal parts; where dynamic sampling found too few groups they
    are smaller, or fewer."""
    size = -(-len(rollouts) // run.config.train.updates_per_rollout)
    return [slice(i, i + size) for i in range(0, len(rollouts), size)]


def prepare(
    run: Run, state: LearnerState, rollouts: Sequence[Rollout], targets: Targets
) -> Minibatch:
    """A mini-batch with the scores that the loss needs and that are known before its update."""
    minibatch = _packed(run, rollouts, targets)
    needs = run.recipe.objective.needs
    if Need.REFERENCE in needs:
        assert run.reference is not None
        reference = lora.with_trainable(state.params, run.reference)
        scores = run.learner.score(reference, minibatch)
        minibatch = dataclasses.replace(minibatch, reference=scores)
    if Need.ANCHOR in needs and run.config.train.updates_per_rollout > 1:
        scores = run.learner.score(state.params, minibatch)
        minibatch = dataclasses.replace(minibatch, anchor=scores)
    return minibatch


def with_entropy_weights(minibatch: Minibatch, coefficient: float) -> Minibatch:
    """The mini-batch with the coefficient of an adaptive entropy bonus."""
    weights = jnp.full_like(minibatch.batch.advantages, coefficient)
    batch = dataclasses.replace(minibatch.batch, entropy_weights=weights)
    return dataclasses.replace(minibatch, batch=batch)


def per_token(
    run: Run,
    rollouts: Sequence[Rollout],
    score: Callable[[Minibatch], jax.Array],
    *,
    parts: Sequence[slice],
) -> list[np.ndarray]:
    """What `score` finds for the tokens of each answer, f32[C]; 0 where the policy did not
    choose."""
    found: list[np.ndarray] = []
    for part in parts:
        some = rollouts[part]
        minibatch = _packed(run, some, Targets(np.zeros(len(some)), None, None))
        found += unpacked(run, some, fetch(score(minibatch)))
    return found


def unpacked(run: Run, rollouts: Sequence[Rollout], values: np.ndarray) -> list[np.ndarray]:
    """Values of a mini-batch [N, T], by answer: [C] each."""
    return gather(values, rollouts, rows=_rows(run, rollouts)[0])


def _rows(run: Run, rollouts: Sequence[Rollout]) -> tuple[list[Sequence[int]], int]:
    """Which answers lie in which row of a mini-batch, and the microbatches in use."""
    c = run.config
    if c.train.packing:
        rows = assign_rows([r.length for r in rollouts], row_length=c.row_length)
    else:
        rows = [[i] for i in range(len(rollouts))]
    # Room for the worst case, one sequence to a row, so that the step compiles once.
    most = -(-c.minibatch_completions // c.microbatch_rows)
    return interleave(rows, rows_per_microbatch=c.microbatch_rows, max_microbatches=most)


def _packed(run: Run, rollouts: Sequence[Rollout], targets: Targets) -> Minibatch:
    rows, used = _rows(run, rollouts)
    batch = pack(
        rollouts,
        list(targets.advantages),
        values=targets.values,
        returns=targets.returns,
        rows=rows,
        row_length=run.config.row_length,
    )
    sharding = run.layout.batch(("batch", "length"))
    return Minibatch(batch=place(batch, sharding), microbatches=jnp.int32(used))
