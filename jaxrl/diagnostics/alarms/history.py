"""The metrics of a run as time series, for rules during a run and afterwards."""

import bisect
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Series(NamedTuple):
    """One metric: its values and the steps after which they were logged, in order."""

    steps: list[int]
    values: list[float]


class History:
    """Time series of all metrics.

    Attributes:
      step: of the newest entry.
      begun: step before the first entry; 0 unless the run is a fork, or has lost its metrics.
      since: step after which the run has used its present precision.
    """

    def __init__(self, entries: Iterable[Mapping[str, Any]] = ()) -> None:
        self.step = self.since = self.begun = 0
        self._series: dict[str, Series] = {}
        self._highest: dict[str, float] = {}
        for entry in entries:
            self.add(entry)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Adds an entry of `tracking.read_metrics`; skips values that are not finite numbers."""
        if not self._series:
            self.begun = max(0, int(entry["step"]) - 1)
        self.step = int(entry["step"])
        if "precision" in entry.get("event", {}).get("changes", {}):
            self.since = self.step
        for name, value in entry.items():
            if isinstance(value, int | float) and math.isfinite(value):
                series = self._series.setdefault(name, Series([], []))
                series.steps.append(self.step)
                series.values.append(float(value))
                self._highest[name] = max(self.highest(name), value)

    @property
    def done(self) -> int:
        """The steps from the first entry to the newest one."""
        return self.step - self.begun

    @property
    def names(self) -> list[str]:
        """Names of all metrics."""
        return list(self._series)

    def series(self, name: str) -> Series:
        """Returns a metric; empty if it was never logged."""
        return self._series.get(name, Series([], []))

    def highest(self, name: str) -> float:
        """Returns the largest value, or -inf."""
        return self._highest.get(name, -math.inf)

    def between(self, name: str, after: int, upto: int) -> np.ndarray:
        """Returns the values of steps in (after, upto], f64[N]."""
        steps, values = self.series(name)
        start, end = bisect.bisect_right(steps, after), bisect.bisect_right(steps, upto)
        return np.array(values[start:end])

    def at(self, name: str, step: int) -> float:
        """Returns the last value of a step, or NaN."""
        steps, values = self.series(name)
        end = bisect.bisect_right(steps, step)
        return values[end - 1] if end and steps[end - 1] == step else math.nan

    def present(self, name: str) -> Series:
        """Returns a metric in the present precision; empty if the newest step has no value."""
        steps, values = self.series(name)
        start = bisect.bisect_right(steps, self.since)
        known = steps and steps[-1] == self.step
        return Series(steps[start:], values[start:]) if known else Series([], [])

    def before(self, name: str, count: int) -> np.ndarray:
        """Returns up to `count` values before the newest step's, f64[N]."""
        steps, values = self.series(name)
        end = len(steps) - bool(steps and steps[-1] == self.step)
        return np.array(values[max(0, end - count) : end])

    def last(self, name: str, count: int) -> np.ndarray:
        """Returns the last values including the newest step's, f64[count]; empty if that step has
        none, or if there are fewer values."""
        steps, values = self.series(name)
        if len(values) < count or steps[-1] != self.step:
            return np.array([])
        return np.array(values[-count:])

    def first(self, name: str, count: int) -> np.ndarray:
        """Returns up to `count` first values, f64[N]."""
        return np.array(self.series(name).values[:count])
