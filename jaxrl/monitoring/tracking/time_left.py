"""The estimate of a run's remaining time."""

import itertools
import statistics
from collections.abc import Sequence

RECENT_STEPS = 20  # that the estimate is made from


def seconds_left(times: Sequence[tuple[int, float]], *, total: int) -> float | None:
    """Estimates the remaining seconds from the median recent step; None before two steps.

    Args:
      times: (step, seconds at its end); steps may be missing.
      total: steps of the whole run.
    """
    pairs = itertools.pairwise(times[-RECENT_STEPS - 1 :])
    durations = [(b - a) / max(1, after - before) for (before, a), (after, b) in pairs]
    return statistics.median(durations) * (total - times[-1][0]) if durations else None


def format_duration(seconds: float) -> str:
    """Formats seconds as "11:59" or "1:00:00"."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
