"""Differences in the learner's log-probs that are due to the shapes of arrays alone.

XLA chooses the order of additions by shape. Unless sums are fixed, the log-probs of a sequence thus
depend on the length of its row and on its neighbours. No change of dtypes brings beta below this
noise.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxrl.core.batch import Minibatch, Rollout
from jaxrl.core.packing import MinibatchShape, pack_minibatch, unpack
from jaxrl.sharding.transfer import fetch


def longer_rows(shape: MinibatchShape) -> MinibatchShape:
    """Returns the shape of a microbatch with rows of twice the length."""
    rows = shape.rows_per_microbatch
    return dataclasses.replace(shape, row_length=2 * shape.row_length, max_rows=rows)


def shape_noise(
    score: Callable[[Minibatch], jax.Array],
    rollouts: Sequence[Rollout],
    *,
    shape: MinibatchShape,
    scores: np.ndarray,
) -> np.ndarray:
    """Scores a microbatch again in `longer_rows`. The rollouts are packed into a minibatch of this
    shape, whose log-probs by `score` (see `Learner.score`) are `scores`, f32[N, T].

    Returns:
      f64[M], the first log-probs of the action tokens minus the second; M may be 0, where all
      completions of the microbatch are masked.
    """
    some, longer = rollouts[: shape.rows_per_microbatch], longer_rows(shape)
    again = fetch(score(pack_minibatch(some, [0.0] * len(some), shape=longer)))
    firsts = unpack(scores, rollouts, shape=shape)[: len(some)]
    seconds = unpack(again, some, shape=longer)
    differences = [
        (first.astype(np.float64) - second)[rollout.action_mask]
        for first, second, rollout in zip(firsts, seconds, some, strict=True)
    ]
    return np.concatenate(differences)
