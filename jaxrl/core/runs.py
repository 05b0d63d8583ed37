"""Runs of tokens of one sequence in packed rows, with bounds for kernels that reserve memory."""

from typing import Any, NamedTuple

import numpy as np

from jaxrl.core.buckets import count_bucket

_FEWEST, _SHORTEST = 4, 128  # runs of a row, and tokens of a run, that `Runs` bounds


class Runs(NamedTuple):
    """Bounds of the runs of equal numbers in a batch's segments, padding included, for kernels that
    reserve memory for each run. They are part of the compiled program: few values, see
    `bound_runs`."""

    most: int  # runs of a row
    longest: int  # tokens of a run, a divisor of the row's; longer padding counts as several runs


def most_sequences(row_length: int) -> int:
    """Bounds the sequences of a row, so that kernels of attention can reserve memory for each."""
    return 16 + row_length // 256


def bound_runs(segments: np.ndarray) -> Runs:
    """Bounds the runs of segments i32[N, T]: their number in a row by a power of two, and their
    length by T, T / 2, T / 4 and so on."""
    length, before = segments.shape[1], np.roll(segments, 1, axis=1)
    first = np.flatnonzero(run_begins(segments, longest=length, before=before))
    sizes = np.diff(first, append=segments.size)[segments.reshape(-1)[first] > 0]
    longest = length
    while longest % 2 == 0 and longest // 2 >= max(_SHORTEST, sizes.max(initial=1)):
        longest //= 2
    begins = run_begins(segments, longest=longest, before=before)
    return Runs(count_bucket(int(begins.sum(axis=1).max()), multiple=_FEWEST), longest)


def run_begins(segments: Any, *, longest: int, before: Any) -> Any:
    """Marks the first tokens of the runs of equal numbers in segments [B, T]: bool[B, T]. `before`
    is each token's predecessor, anything for the first of a row. Padding begins again after each
    `longest` tokens of the row."""
    places = np.arange(segments.shape[1])[None]
    pieces = (segments == 0) & (places % longest == 0)
    return (segments != before) | pieces | (places == 0)
