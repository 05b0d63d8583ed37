"""Scoring of sampled completions outside of training, with the run's own parts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.core import Minibatch, MinibatchShape, Rollout, pack_minibatch
from jaxrl.learner import LearnerState
from jaxrl.training.progress import Progress
from jaxrl.training.rollouts.collect import collect
from jaxrl.training.run import Run


class Scored(NamedTuple):
    """Log-probs of the same tokens, f64[N, T]; NaN outside of the completions."""

    learner: np.ndarray
    shadow: np.ndarray


def sampled(run: Run, progress: Progress) -> list[Rollout]:
    """Samples a rollout with rewards."""
    return collect(run.source, progress=progress, seconds={}).batch


def minibatch(run: Run, rollouts: Sequence[Rollout]) -> Minibatch:
    """Packs one completion per row; the advantage is the reward less its group's mean."""
    rewards = np.array([r.reward for r in rollouts])
    groups = np.unique([r.group for r in rollouts], return_inverse=True)[1]
    means = np.bincount(groups, rewards) / np.bincount(groups)
    per_microbatch = run.config.microbatch_rows
    assert len(rollouts) % per_microbatch == 0, "else the rows would have to be padded"
    shape = MinibatchShape(
        row_length=run.config.row_length, rows_per_microbatch=per_microbatch, packed=False
    )
    return pack_minibatch(rollouts, list(rewards - means[groups]), shape=shape)


def score(run: Run, state: LearnerState, given: Minibatch) -> Scored:
    """Scores the completions in the learner's and in the sampler's dtypes."""
    mask = np.asarray(given.batch.action_mask)
    learner = run.learning.learner
    both = learner.score(state.params, given), learner.shadow_scores(state.params, given)[0]
    return Scored(*(np.where(mask, np.asarray(x, np.float64), np.nan) for x in both))
