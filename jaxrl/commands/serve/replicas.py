"""Servers that are started again when they end or hang."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Protocol, Self

from jaxrl.bridge.servers.launch import ServerFailedError

_EVERY = 15.0  # seconds between two questions whether a server is well
_MISSES = 12  # unanswered in a row, after which it hangs: an update takes less
_LONGEST = 64.0  # seconds between two attempts to start it


class Running(Protocol):
    """A server that runs."""

    @property
    def url(self) -> str:
        """Its address, which stays the same when it is started again."""
        ...

    def check(self) -> None:
        """Nothing while it runs; raises ServerFailedError when it has ended."""
        ...

    def healthy(self) -> bool:
        """Whether it answers that it is well, also while it loads weights or is paused."""
        ...


class Replica:
    """A server that is started again, at once if it was well before and after waits that double if
    it was not. Whatever happens to it is said and not raised: others need their supervisor."""

    def __init__(
        self,
        start: Callable[[], AbstractContextManager[Running]],
        *,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts it.

        Args:
          start: a server that is ready, and ends with the block.
          note: shows a line to the user.
          clock: seconds.

        Raises:
          ServerFailedError: if it does not start this first time.
        """
        self._start, self._note, self._clock = start, note, clock
        self._stack = ExitStack()
        self._failures, self._misses = 0, 0
        self._server: Running | None = self._stack.enter_context(start())
        self.url = self._server.url
        self._due = clock() + _EVERY

    def check(self) -> None:
        """Looks after the server; where it has to be started, until it is ready."""
        due = self._clock() >= self._due
        try:
            if self._server is not None:
                self._server.check()
                if due:
                    self._ask(self._server)
            elif due:
                self._server = self._stack.enter_context(self._start())
                self._misses, self._due = 0, self._clock() + _EVERY
        except ServerFailedError as error:
            self._stack.close()
            self._server = None
            wait = min(2.0**self._failures, _LONGEST) if self._failures else 0.0
            self._failures, self._due = self._failures + 1, self._clock() + wait
            self._note(f"{self.url} is started again in {wait:.0f} s: {error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _ask(self, server: Running) -> None:
        self._due = self._clock() + _EVERY
        if server.healthy():
            self._failures, self._misses = 0, 0
            return
        self._misses += 1
        if self._misses == _MISSES:
            raise ServerFailedError(f"it was not well for {_MISSES * _EVERY:.0f} s")
