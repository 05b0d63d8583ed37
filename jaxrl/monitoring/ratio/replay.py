"""The log-ratio in three parts, with the sampler's own engine asked again.

`split` computes the shadow in JAX, so that what vLLM does otherwise than JAX in the same dtype
counts as alpha. Here the sampler scores the same tokens with the weights that it serves now, the
*replay*, and the ratio falls into

    learner - sampler = (learner - shadow) + (shadow - replay) + (replay - sampler)
                      =       dtype        +      engine       +      policy

dtype + engine is all of the arithmetic between learner and sampler, and policy is one engine with
newer weights against the same with older ones. Where the weights are the same, what is left of it
is the difference between decoding tokens and reading them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.monitoring.ratio.split import moments

Score = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
"""Sequences of token ids i32[T] -> f32[T] log-probs, NaN where there is none."""


class Parts(NamedTuple):
    """Parts of the log-ratio of N tokens, each f64[N]; they add up to learner - sampler."""

    dtype: np.ndarray
    engine: np.ndarray
    policy: np.ndarray


def parts(
    *, learner: np.ndarray, shadow: np.ndarray, replay: np.ndarray, sampler: np.ndarray
) -> Parts:
    """The parts of the log-ratio, from four log-probs f[N] of the same tokens."""
    a, b, c, d = (x.astype(np.float64) for x in (learner, shadow, replay, sampler))
    return Parts(dtype=a - b, engine=b - c, policy=c - d)


def replay_batch(score: Score, *, tokens: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Scores all sequences of a rectangular batch.

    Args:
      score: the sampler's, such as `VllmSampler.score`.
      tokens: i32[B, T].
      segments: i32[B, T], sequence within the row, 0 for padding.

    Returns:
      f32[B, T]; NaN for first tokens, for padding and where the sampler gives none.
    """
    places = [
        (row, segments[row] == number)
        for row in range(len(tokens))
        for number in np.unique(segments[row][segments[row] > 0])
    ]
    found = score([tokens[row][where] for row, where in places])
    filled = np.full(tokens.shape, np.nan, np.float32)
    for (row, where), logprobs in zip(places, found, strict=True):
        filled[row, where] = logprobs
    return filled


def summary(found: Parts) -> dict[str, float]:
    """Of each part its mean, "_std" and "_p99" of the magnitude, over tokens that have them all."""
    known = ~np.isnan(found.engine + found.policy)
    return {
        name: value
        for part, values in found._asdict().items()
        for name, value in moments(part, values[known]).items()
    }
