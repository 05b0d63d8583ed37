"""The metrics of a run as columns, to be judged while it goes on or when it is over."""

import bisect
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class Column(NamedTuple):
    """One metric: its values and the steps after which they were logged, in order."""

    steps: list[int]
    values: list[float]


class Ends(NamedTuple):
    """The first and the last values of a metric, how many there are in all, and the newest step
    that was over before the first of the last ones was measured."""

    number: int
    first: np.ndarray
    last: np.ndarray
    before: int


class History:
    """Columns that grow at their end.

    Attributes:
      step: of the newest entry.
      since: after which the run has computed in the precision that it has now.
    """

    def __init__(self) -> None:
        self.step = self.since = 0
        self._columns: dict[str, Column] = {}
        self._highest: dict[str, float] = {}

    def add(self, entry: Mapping[str, Any]) -> None:
        """Takes an entry as `tracking.read_metrics` returns it. What is no finite number is left
        out."""
        self.step = int(entry["step"])
        if "precision" in entry.get("event", {}).get("changes", {}):
            self.since = self.step
        for name, value in entry.items():
            if isinstance(value, int | float) and math.isfinite(value):
                column = self._columns.setdefault(name, Column([], []))
                column.steps.append(self.step)
                column.values.append(float(value))
                self._highest[name] = max(self.highest(name), value)

    @property
    def names(self) -> list[str]:
        """Of all metrics."""
        return list(self._columns)

    def column(self, name: str) -> Column:
        """A metric; empty if it was never logged."""
        return self._columns.get(name, Column([], []))

    def newest(self, name: str) -> float:
        """The value of this step; NaN if it has none."""
        steps, values = self.column(name)
        return values[-1] if steps and steps[-1] == self.step else math.nan

    def highest(self, name: str) -> float:
        """Of all values; -inf if there is none."""
        return self._highest.get(name, -math.inf)

    def between(self, name: str, after: int, upto: int) -> np.ndarray:
        """The values of the steps after one and up to another, f64[N]."""
        steps, values = self.column(name)
        start, end = bisect.bisect_right(steps, after), bisect.bisect_right(steps, upto)
        return np.array(values[start:end])

    def at(self, name: str, step: int) -> float:
        """The value of some step; NaN if it has none."""
        steps, values = self.column(name)
        place = bisect.bisect_left(steps, step)
        return values[place] if place < len(steps) and steps[place] == step else math.nan

    def ends(self, name: str, count: int) -> Ends:
        """Of the values in the run's present precision; none if this step has none."""
        steps, values = self.column(name)
        if not steps or steps[-1] != self.step:
            return Ends(0, np.array([]), np.array([]), self.step)
        start = bisect.bisect_right(steps, self.since)
        number = len(values) - start
        some = min(count, number)
        first, last = values[start : start + some], values[len(values) - some :]
        return Ends(number, np.array(first), np.array(last), steps[-max(some, 1)] - 1)

    def before(self, name: str, count: int) -> np.ndarray:
        """The last `count` values before this step's, or as many as there are; f64[N]."""
        steps, values = self.column(name)
        end = len(steps) - bool(steps and steps[-1] == self.step)
        return np.array(values[max(0, end - count) : end])

    def last(self, name: str, count: int) -> np.ndarray:
        """The last `count` values, this step's among them, f64[count]; empty if this step has none
        or there are fewer."""
        steps, values = self.column(name)
        if len(values) < count or steps[-1] != self.step:
            return np.array([])
        return np.array(values[-count:])

    def first(self, name: str, count: int) -> np.ndarray:
        """The first `count` values, or as many as there are; f64[N]."""
        return np.array(self.column(name).values[:count])
