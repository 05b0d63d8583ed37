"""Comparisons of recent steps with a run's first, shared by the alarm rules."""

import itertools
import math
from statistics import fmean

import numpy as np

from jaxrl.diagnostics.alarms.history import History
from jaxrl.diagnostics.alarms.limits import Limits
from jaxrl.diagnostics.alarms.table import Finding

PROBES = 3  # averaged
_SOLVED = 0.9  # of the range of rewards: above it a policy may be certain


def solved(history: History, limits: Limits) -> bool:
    """Returns True if the recent mean reward is in the top tenth of the range of rewards.

    Certainty and identical completions are then the goal. The range begins at the first steps' 10th
    percentile, so that a single large penalty does not make the rest look good.
    """
    worst = history.first("reward/p10", limits.warmup)
    rewards = history.last("reward", limits.short)
    if not worst.size or not rewards.size:
        return False
    low, high = float(np.median(worst)), history.highest("reward/max")
    return float(rewards.mean()) >= low + _SOLVED * (high - low)


def means(history: History, limits: Limits, name: str, count: int) -> tuple[float, float]:
    """Returns the means of the last `count` values and of the first steps; NaN without them."""
    values, first = history.last(name, count), history.first(name, limits.warmup)
    return (float(values.mean()), float(first.mean())) if values.size else (math.nan, math.nan)


def fallen(history: History, limits: Limits, name: str, factor: float, noun: str) -> Finding | None:
    """Compares the mean of the last steps with `factor` times the mean of the first."""
    value, usual = means(history, limits, name, limits.short)
    text = f"{value:.3g} {noun}, {usual:.3g} in the first steps"
    return Finding(value, factor * usual, text) if value < factor * usual else None


def grown(history: History, name: str, *, floor: float, noun: str) -> Finding | None:
    """Compares the last three probes in the present precision with the first three."""
    steps, values = history.present(name)
    if len(steps) < 2 * PROBES:
        return None
    value, first = fmean(values[-PROBES:]), fmean(values[:PROBES])
    limit = max(2 * first, floor)
    text = f"{value:.3g} {noun}, {first:.3g} in the first probes"
    return Finding(value, limit, text, steps[-PROBES] - 1) if value > limit else None


def norms_with_variance(history: History, count: int) -> list[float]:
    """Returns gradient norms of the last `count` earlier steps in which some group had reward
    variance, looking back at most ten times as many steps."""
    steps, values = history.series("grad_norm")
    norms: list[float] = []
    newest_first = zip(reversed(steps), reversed(values), strict=True)
    for step, value in itertools.islice(newest_first, 10 * count):
        flat, groups = (history.at(f"groups/{n}", step) for n in ("zero_std", "sampled"))
        if step != history.step and not flat >= groups:
            norms.append(value)
            if len(norms) == count:
                break
    return norms
