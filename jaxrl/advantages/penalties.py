"""Penalties that are added to rewards."""

import numpy as np


def overlong_penalty(lengths: np.ndarray, *, longest: int, buffer: int) -> np.ndarray:
    """Computes DAPO's length penalty (arXiv:2503.14476): 0 up to longest - buffer tokens, then
    linear down to -1 at `longest`; f64[N].

    Example:
      >>> overlong_penalty(np.array([70, 90, 100]), longest=100, buffer=20).tolist()
      [0.0, -0.5, -1.0]
    """
    return np.minimum((longest - buffer - np.asarray(lengths)) / buffer, 0.0)
