"""The steps of periodic work, and the seconds that parts of a step take."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

Numbers = dict[str, float]
"""Metrics of a step by name."""


def is_due(every: int, step: int) -> bool:
    """Returns true at multiples of `every`, never for 0."""
    return every > 0 and step % every == 0


@contextmanager
def clock(seconds: Numbers, name: str) -> Iterator[None]:
    """Adds the wall-clock seconds of the block to `seconds[name]`; the block is also a span of
    OpenTelemetry, if that is loaded, as by `opentelemetry-instrument`."""
    start = time.perf_counter()
    telemetry = sys.modules.get("opentelemetry.trace")
    span = telemetry.get_tracer("jaxrl").start_as_current_span(name) if telemetry else nullcontext()
    with span:
        yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
