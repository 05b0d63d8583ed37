"""The time that a run will take still, and how it is written."""

import itertools
import statistics
from collections.abc import Sequence

RECENT = 20  # steps that the time left is estimated from


def seconds_left(times: Sequence[tuple[int, float]], *, total: int) -> float | None:
    """Of a run, from the median of its last steps; None before there are two.

    Args:
      times: (step, seconds at its end), not necessarily of every step.
      total: steps of the whole run.
    """
    pairs = itertools.pairwise(times[-RECENT - 1 :])
    taken = [(b - a) / max(1, after - before) for (before, a), (after, b) in pairs]
    return statistics.median(taken) * (total - times[-1][0]) if taken else None


def clock(seconds: float) -> str:
    """Such as "11:59", or "1:00:00"."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
