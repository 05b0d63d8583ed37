"""Thinning of long curves, so that the page of a 10,000-step run stays small."""

from collections.abc import Collection, Mapping

from jaxrl.monitoring.alarms.history import Series

_MOST_POINTS = 2000  # per curve

Points = list[list[float]]  # [steps, values]


def extremes(column: Series) -> Points:
    """Thins a curve to at most 2,000 points: the lowest and highest of each stretch."""
    steps, values = column
    if len(values) > _MOST_POINTS:
        size = -(-2 * len(values) // _MOST_POINTS)
        kept = set[int]()
        for start in range(0, len(values), size):
            stretch = range(start, min(start + size, len(values)))
            kept |= {min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
        order = sorted(kept)
        steps, values = [steps[i] for i in order], [values[i] for i in order]
    return [[float(s) for s in steps], [_short(value) for value in values]]


def means(columns: Mapping[str, Series], *, without: Collection[int] = ()) -> dict[str, Points]:
    """Thins stacked curves, {name: curve}, to at most 2,000 points each.

    A point is the mean over a stretch of steps, the same for all curves, at its middle step. A
    missing value counts as 0. Steps in `without` are left out.
    """
    found = {name: dict(zip(*column, strict=True)) for name, column in columns.items()}
    steps = sorted({step for values in found.values() for step in values} - set(without))
    size = -(-len(steps) // _MOST_POINTS) or 1
    stretches = [steps[start : start + size] for start in range(0, len(steps), size)]
    middles = [float(stretch[len(stretch) // 2]) for stretch in stretches]
    return {
        name: [
            middles,
            [_short(sum(values.get(s, 0.0) for s in some) / len(some)) for some in stretches],
        ]
        for name, values in found.items()
        if middles
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")
