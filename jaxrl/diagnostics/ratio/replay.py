"""The log-ratio in three parts, with the sampler's engine scoring the tokens again.

`split_log_ratio` computes the shadow in JAX, so differences between vLLM and JAX in the same dtype
count as alpha. Here the sampler also scores the tokens with its current weights, the *replay*, and
the log-ratio splits into

    learner - sampler = (learner - shadow) + (shadow - replay) + (replay - sampler)
                      =       dtype        +      engine       +      policy

dtype + engine is the arithmetic between learner and sampler. policy compares one engine with newer
and older weights; at equal weights it is the difference between decoding and prefill.
"""

from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.diagnostics.ratio.split import Split, moments

Score = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
"""Sequences of token ids i32[T] -> f32[T] log-probs, NaN where there is none."""


def replay_batch(
    score: Score, *, tokens: np.ndarray, segments: np.ndarray, seen_until: np.ndarray | None = None
) -> np.ndarray:
    """Scores all sequences of a rectangular batch.

    Args:
      score: the sampler's, such as `VllmSampler.score`.
      tokens: i32[B, T].
      segments: i32[B, T], sequence within the row, 0 for padding.
      seen_until: i32[B, T], of a batch whose sequences share prefixes (`TokenBatch`).

    Returns:
      f32[B, T]; NaN for first tokens, padding and tokens without a score.
    """
    places = []  # row, a sequence's own tokens, all of its tokens
    for row in range(len(tokens)):
        for number in np.unique(segments[row][segments[row] > 0]):
            own = whole = np.flatnonzero(segments[row] == number)
            if seen_until is not None:
                whole = np.flatnonzero(seen_until[row, : own[-1] + 1] > own[-1])
            places.append((row, own, whole))
    scores = score([tokens[row, whole] for row, _, whole in places])
    filled = np.full(tokens.shape, np.nan, np.float32)
    for (row, own, _), logprobs in zip(places, scores, strict=True):
        filled[row, own] = logprobs[len(logprobs) - len(own) :]
    return filled


def log_ratio_parts(split: Split, *, replay: np.ndarray) -> dict[str, float]:
    """Computes `moments` of the log-ratio's parts "dtype", "engine" and "policy", in nats, over
    action tokens with all four log-probs. `replay` is the result of `replay_batch`."""
    scores = (split.learner, split.shadow, replay, split.sampler)
    a, b, c, d = (x[split.action_mask].astype(np.float64) for x in scores)
    known = ~np.isnan(c - d)
    parts = {"dtype": a - b, "engine": b - c, "policy": c - d}
    return {k: v for part, x in parts.items() for k, v in moments(part, x[known]).items()}
