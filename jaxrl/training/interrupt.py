"""SIGTERM and Ctrl-C as a flag that a loop checks at the points where it can stop."""

import signal
from types import FrameType
from typing import Self


class Interrupt:
    """Records the first SIGTERM or SIGINT of the block; a second one ends the process."""

    signum: int | None = None  # the received signal, or None

    def __enter__(self) -> Self:
        self._previous = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
        for s in self._previous:
            signal.signal(s, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self._restore()

    def _restore(self) -> None:
        for s, handler in self._previous.items():
            signal.signal(s, handler)
