"""Division of a decoder's layers into scans: each repeats a period of layers."""

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple


class LayerSpan(NamedTuple):
    """Consecutive layers that repeat a period."""

    first: int  # index of the first layer
    period: int  # layers per repetition
    count: int  # repetitions; 1 only for a single layer

    @property
    def end(self) -> int:
        """Index after the last layer."""
        return self.first + self.period * self.count


def divide(layers: Sequence[Hashable]) -> tuple[LayerSpan, ...]:
    """Divides layers into spans; equal values in `layers` stand for layers that may share a scan.

    The periods of the spans have the fewest layers in all, since the program contains each of
    these once. Ties go to the fewest spans, then to the longest earlier spans.
    """
    numbers = {one: number for number, one in enumerate(dict.fromkeys(layers))}
    kinds = [numbers[one] for one in layers]  # cheap to compare
    best: dict[int, tuple[LayerSpan, ...]] = {len(kinds): ()}  # for the layers from an index on
    for first in reversed(range(len(kinds))):
        best[first] = min(
            ((span, *best[span.end]) for span in _spans(kinds, first)),
            key=lambda spans: (sum(one.period for one in spans), len(spans), -spans[0].end),
        )
    return best[0]


def _spans(kinds: list[int], first: int) -> Iterator[LayerSpan]:
    """Lists the spans that begin with a layer."""
    yield LayerSpan(first, 1, 1)
    for period in range(1, (len(kinds) - first) // 2 + 1):
        start, end = kinds[first : first + period], first + 2 * period
        while kinds[end - period : end] == start:
            yield LayerSpan(first, period, (end - first) // period)
            end += period
