"""Scoring of sampled completions outside of training, with the run's own parts."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core.batch import Minibatch, Rollout
from jaxrl.core.packing import pack
from jaxrl.learner.policy import LearnerState
from jaxrl.training.rollouts import answers
from jaxrl.training.run import Progress, Run


class Scored(NamedTuple):
    """Log-probs of the same tokens, f64[N, T]; NaN outside of the completions."""

    learner: np.ndarray
    shadow: np.ndarray


def sampled(run: Run, progress: Progress) -> list[Rollout]:
    """Samples a rollout with rewards."""
    return answers.collect(run, progress, seconds={}).batch


def minibatch(run: Run, rollouts: Sequence[Rollout]) -> Minibatch:
    """Packs one completion per row; the advantage is the reward less its group's mean."""
    rewards = np.array([r.reward for r in rollouts])
    groups = np.unique([r.group for r in rollouts], return_inverse=True)[1]
    means = np.bincount(groups, rewards) / np.bincount(groups)
    rows = [[i] for i in range(len(rollouts))]
    per_microbatch = run.config.microbatch_rows
    assert len(rows) % per_microbatch == 0, "else the rows would have to be padded"
    batch = pack(
        rollouts, list(rewards - means[groups]), rows=rows, row_length=run.config.row_length
    )
    return Minibatch(
        batch=jax.tree.map(jnp.asarray, batch),
        microbatches=jnp.int32(len(rows) // per_microbatch),
    )


def score(run: Run, state: LearnerState, given: Minibatch) -> Scored:
    """Scores the completions in the learner's and in the sampler's dtypes."""
    mask = np.asarray(given.batch.action_mask)
    both = (f(state.params, given) for f in (run.learner.score, run.learner.shadow))
    return Scored(*(np.where(mask, np.asarray(x, np.float64), np.nan) for x in both))
