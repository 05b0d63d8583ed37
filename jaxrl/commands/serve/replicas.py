"""Supervised servers, restarted after they exit or hang."""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack

from jaxrl.bridge import LocalServer, ServerFailedError
from jaxrl.builders.servers import StartingServer

_EVERY = 15.0  # seconds between two health checks
_MISSES = 12  # failed checks in a row that count as a hang; a weight update takes less
_LONGEST = 64.0  # seconds between two starts


class Replica(AbstractContextManager["Replica"]):
    """A server that is restarted: at once if it was healthy, otherwise after waits that double.

    Failures after `wait` are reported and not raised, so that one server cannot stop the
    supervisor.
    """

    def __init__(
        self,
        start: Callable[[], AbstractContextManager[StartingServer]],
        *,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the server; call `wait` before using it. `start` opens a block that begins a start
        and stops the server at its end.

        Raises:
          ServerFailedError: if the server cannot be started.
        """
        self._start, self._note, self._clock = start, note, clock
        self._stack = ExitStack()
        self._failures, self._misses = 0, 0
        self._first = self._stack.enter_context(start())
        self._server: LocalServer | None = self._first.server
        self.url = self._server.url
        self._due = clock() + _EVERY

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Waits until the server is ready for the first time; raises as `StartingServer.wait`."""
        self._first.wait(meanwhile)
        self._due = self._clock() + _EVERY

    def check_start(self) -> None:
        """Raises ServerFailedError if the server has ended while the replicas start."""
        self._first.server.check()

    def check(self) -> None:
        """Checks the server; restarts it and waits until it is ready if it failed."""
        due = self._clock() >= self._due
        try:
            if self._server is not None:
                self._server.check()
                if due:
                    self._check_health(self._server)
            elif due:
                self._server = self._stack.enter_context(self._start()).wait()
                self._misses, self._due = 0, self._clock() + _EVERY
        except ServerFailedError as error:
            self._stack.close()
            self._server = None
            wait = min(2.0**self._failures, _LONGEST) if self._failures else 0.0
            self._failures, self._due = self._failures + 1, self._clock() + wait
            self._note(f"{self.url} failed; restarting in {wait:.0f} s: {error}")

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _check_health(self, server: LocalServer) -> None:
        self._due = self._clock() + _EVERY
        if server.healthy():
            self._failures, self._misses = 0, 0
            return
        self._misses += 1
        if self._misses == _MISSES:
            raise ServerFailedError(f"no healthy answer for {_MISSES * _EVERY:.0f} s")


def open_replicas(begun: Iterable[Replica], stack: ExitStack, *, together: bool) -> list[Replica]:
    """Starts servers, all `together` or one after the other, and waits until they are ready.
    Iterating over `begun` starts each; `stack` stops them.

    Raises:
      ServerFailedError: as soon as any of them fails to start or ends.
    """
    replicas: list[Replica] = []

    def check() -> None:
        for replica in replicas:
            replica.check_start()

    for replica in begun:
        replicas.append(stack.enter_context(replica))
        if not together:
            replica.wait(check)
    if together:
        for replica in replicas:
            replica.wait(check)
    return replicas
