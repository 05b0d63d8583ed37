"""SIGTERM and Ctrl-C for a process that only waits for others."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jaxrl.fleet.engine import import_ray

_POLL = 0.5  # seconds between two looks for a signal


class InterruptedFleetError(Exception):
    """A signal ended a wait."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"signal {signum}")
        self.signum = signum


class Signals:
    """The signals that this process has received in the block, in their order."""

    def __init__(self) -> None:
        self.received: list[int] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Records SIGTERM and SIGINT for the block."""
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in before:
            signal.signal(number, self._record)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def check(self, *, allowed: int = 0) -> None:
        """Raises InterruptedFleetError if more signals than are `allowed` have come."""
        if len(self.received) > allowed:
            raise InterruptedFleetError(self.received[0])

    def wait(self, answers: Sequence[Any], *, seconds: float) -> bool:
        """Waits until all answers of actors are there; returns False if time runs out. Raises
        InterruptedFleetError at a signal."""
        until = time.monotonic() + seconds
        while True:
            self.check()
            left = max(0.0, min(_POLL, until - time.monotonic()))
            ready, _ = import_ray().wait(list(answers), num_returns=len(answers), timeout=left)
            if len(ready) == len(answers):
                return True
            if time.monotonic() >= until:
                return False

    def sleep(self, seconds: float) -> None:
        """Sleeps; raises InterruptedFleetError at a signal."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(_POLL, left))

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)
