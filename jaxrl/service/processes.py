"""The processes of a service: process 0 gives the orders, and all carry them out."""

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import jax

from jaxrl.core import Hosts, report

P = ParamSpec("P")
R = TypeVar("R")

_PREFIX = "jaxrl/service"
_POLL = 1000  # milliseconds of a wait for an order; signals are handled in between
_PATIENCE = 120  # seconds that a process which has failed waits for the others to fail too


class Processes:
    """The processes of a service; with one every method is a no-op.

    Between orders the other processes wait at jax's coordination service, not in a collective,
    which would keep their devices busy and end by its time limit.
    """

    def __init__(self) -> None:
        self.hosts, self._orders = Hosts(), 0
        self._client: Any = None
        if self.hosts.count > 1:
            # In jax 0.10 and 0.11 `jax.distributed` has no public name for the client of its
            # coordination service, and `multihost_utils` has collectives alone.
            from jax._src.distributed import global_state

            self._client = global_state.client

    @property
    def several(self) -> bool:
        """True if there are others."""
        return self._client is not None

    def order(self, *content: Any) -> None:
        """Sends an order to the others, which all arrive at it before this returns."""
        key = f"{_PREFIX}/{self._orders}"
        self._client.key_value_set(key, "")
        self.hosts.share(content)
        self._client.key_value_delete(key)
        self._orders += 1

    def follow(self, *followers: Any) -> None:
        """Carries out the orders of process 0 until it ends. `followers` are the objects whose
        methods are marked `everywhere`, one of each class.

        Raises:
          RuntimeError: if process 0 failed.
          Exception: that of an order which failed in this process and not in process 0.
        """
        of_class = {type(one).__name__: one for one in followers}
        failed: Exception | None = None
        with self._passing_signals_on():
            while True:
                match self._next(failed):
                    case ("end", text):
                        if text is None:
                            return
                        raise RuntimeError(f"process 0: {text}")
                    case ("failed",):  # in all processes
                        failed = None
                    case ("call", name, method, arguments, named):
                        if failed is not None:
                            raise failed
                        one = of_class[name]
                        call = getattr(type(one), method).__wrapped__
                        try:
                            _finished(call(one, *arguments, **named))
                        except Exception as error:
                            failed = error
                            self._client.key_value_set(self._failure(self.hosts.index), "")

    def call(self, method: Callable[..., R], one: Any, *arguments: Any, **named: Any) -> R:
        """Calls a method of `one`, and orders the others to call theirs.

        An error is raised only if all processes have one, so that they still agree about what is on
        the devices. Otherwise this process prints it and exits, which ends the others.
        """
        if not self.several:
            return method(one, *arguments, **named)
        self.order("call", type(one).__name__, method.__name__, arguments, named)
        try:
            return _finished(method(one, *arguments, **named))
        except Exception as error:
            if self._all_failed():
                self.order("failed")
                raise
            report(error)
            os._exit(1)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Ends the others after the block, with its error if it has one. Meanwhile a signal to any
        of them ends this process as if it had been sent here."""
        if not self.several:
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(target=self._heed, args=(ended,), daemon=True)
        thread.start()
        text = None
        try:
            yield
        except Exception as error:
            text = str(error)
            raise
        finally:
            ended.set()
            thread.join()
            self.order("end", text)

    def _all_failed(self) -> bool:
        """Waits for the others to report a failure of the last order."""
        with suppress(jax.errors.JaxRuntimeError):
            for index in range(1, self.hosts.count):
                self._client.blocking_key_value_get(self._failure(index), 1000 * _PATIENCE)
            return True
        return False

    def _failure(self, index: int) -> str:
        return f"{_PREFIX}/failed/{self._orders}/{index}"

    def _heed(self, ended: threading.Event) -> None:
        while not ended.is_set():
            if self._wait(f"{_PREFIX}/stop"):
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _next(self, failed: Exception | None) -> Any:
        """Waits for an order; raises `failed`, if given, when none comes for long."""
        key, waited = f"{_PREFIX}/{self._orders}", 0
        while not self._wait(key):
            waited += _POLL
            if failed is not None and waited > 1000 * _PATIENCE:
                raise failed  # process 0 waits in a collective
        self._orders += 1
        return self.hosts.share(None)

    def _wait(self, key: str) -> bool:
        """Tells whether a key is set, at once or within `_POLL`."""
        try:
            self._client.blocking_key_value_get(key, _POLL)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return False
            raise
        return True

    @contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        def tell(*_: Any) -> None:
            self._client.key_value_set(f"{_PREFIX}/stop", "", allow_overwrite=True)

        before = {one: signal.signal(one, tell) for one in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


class Ordered(Protocol):
    """An object with methods that all processes call together."""

    processes: Processes


T = TypeVar("T", bound=Ordered)


def everywhere(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Marks a method that all processes call when process 0 does, see `Processes.call`. Arguments
    are pickled; results count on process 0 alone. Such a method calls no other one."""

    @functools.wraps(method)
    def call(self: T, *arguments: P.args, **named: P.kwargs) -> R:
        return self.processes.call(method, self, *arguments, **named)

    return call


def _finished(found: Any) -> Any:
    """Exhausts an iterator, whose programs must not mix with those of the next order."""
    return iter(list(found)) if isinstance(found, Iterator) else found
