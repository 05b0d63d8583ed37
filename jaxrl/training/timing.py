"""Wall-clock seconds of the parts of a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

Numbers = dict[str, float]
"""Metrics of a step by name."""


@contextmanager
def clock(seconds: Numbers, name: str) -> Iterator[None]:
    """Adds the wall-clock seconds of the block to `seconds[name]`."""
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
