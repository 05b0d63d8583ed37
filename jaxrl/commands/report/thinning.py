"""Long curves as few points, so that the page of 10,000 steps stays small."""

from collections.abc import Collection, Mapping

from jaxrl.monitoring.alarms.history import Series

_MOST_POINTS = 2000  # of a curve

Points = list[list[float]]  # [steps, values]


def extremes(column: Series) -> Points:
    """At most 2,000 points of a curve: of every stretch its lowest and highest."""
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
    """At most 2,000 points of curves that are added up: the means of the same stretches of steps
    for all, at the middle step of each. A curve that misses a step adds nothing there.

    Args:
      columns: {name: curve}.
      without: steps that are left out.
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
