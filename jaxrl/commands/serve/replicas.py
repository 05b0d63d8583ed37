"""Supervised servers, restarted after they exit or hang."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NoReturn

from jaxrl.bridge import LocalServer, ServerFailedError
from jaxrl.builders.servers import StartingServer

_EVERY = 15.0  # seconds between two health checks
_MISSES = 12  # failed checks in a row that count as a hang; a weight update takes less
_LONGEST = 64.0  # seconds between two starts
_PAUSE = 0.5  # seconds between two looks


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
        turn: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Starts the server; call `wait` before using it. `start` opens a block that begins a start
        and stops the server at its end. Restarts hold `turn`, for instance a lock of all replicas.

        Raises:
          ServerFailedError: if the server cannot be started.
        """
        self._start, self._note, self._clock = start, note, clock
        self._stack = ExitStack()
        self._turn = nullcontext() if turn is None else turn
        self._failures, self._misses, self._closed = 0, 0, False
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
                with self._turn:
                    started = self._stack.enter_context(self._start())
                    self._server = started.wait(self._check_open)
                self._misses, self._due = 0, self._clock() + _EVERY
        except ServerFailedError as error:
            self._stack.close()
            self._server = None
            if self._closed:
                return
            pause = min(2.0**self._failures, _LONGEST) if self._failures else 0.0
            self._failures, self._due = self._failures + 1, self._clock() + pause
            self._note(f"{self.url} failed; restarting in {pause:.0f} s: {error}")

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._stack.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ServerFailedError("stopped while it was starting")

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


def watch(replicas: Sequence[Replica]) -> NoReturn:
    """Checks the replicas until it is interrupted. Each has a thread, so that a start that hangs
    leaves none of the others unwatched, and servers that fail together restart side by side."""
    over = threading.Event()

    def check(replica: Replica) -> None:
        while not over.wait(_PAUSE):
            replica.check()

    with ThreadPoolExecutor(len(replicas)) as pool:
        checks = [pool.submit(check, replica) for replica in replicas]
        try:
            while True:
                for ended in wait(checks, timeout=_PAUSE, return_when=FIRST_EXCEPTION).done:
                    ended.result()
        finally:
            over.set()
            for replica in replicas:
                replica.__exit__()  # ends a start that its thread waits for
