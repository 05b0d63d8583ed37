"""Calls of other people's functions: what raises or hangs costs its own result and no other."""

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

_AT_ONCE = 64  # calls of an asynchronous function


def call_each(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], *, timeout: float
) -> list[Any]:
    """Calls a function with each of several arguments, one after the other, or if it is
    asynchronous up to 64 at once.

    A call that takes too long is left alone in a thread that does not keep the program from ending:
    Python cannot end it.

    Args:
      function: `def` or `async def`.
      arguments: of each call.
      timeout: seconds that a call may take.

    Returns:
      For each call its result, or the exception that it raised, TimeoutError if it took too long.
    """
    if inspect.iscoroutinefunction(function):
        return _at_once(function, arguments, timeout=timeout)
    outcomes: list[Any] = []
    worker = Worker()
    try:
        for one in arguments:
            future = worker.submit(function, *one)
            outcomes.append(_outcome(future, timeout=timeout))
            if not future.done():
                worker.end()
                worker = Worker()
    finally:
        worker.end()
    return outcomes


def _at_once(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], *, timeout: float
) -> list[Any]:
    async def everything() -> list[Any]:
        free = asyncio.Semaphore(_AT_ONCE)

        async def one(call: tuple[Any, ...]) -> Any:
            async with free:
                try:
                    return await asyncio.wait_for(function(*call), timeout)
                except TimeoutError:
                    raise _too_long(timeout) from None

        return await asyncio.gather(*map(one, arguments), return_exceptions=True)

    worker = Worker()
    try:
        rounds = -(-len(arguments) // _AT_ONCE)
        # A call that blocks the event loop holds up all others; one more limit for that.
        found = _outcome(worker.submit(asyncio.run, everything()), timeout=(rounds + 1) * timeout)
    finally:
        worker.end()
    return [found] * len(arguments) if isinstance(found, BaseException) else found


def _outcome(future: Future[Any], *, timeout: float) -> Any:
    try:
        return future.result(timeout)
    except Exception as error:
        return error if future.done() else _too_long(timeout)


def _too_long(timeout: float) -> TimeoutError:
    return TimeoutError(f"it took longer than {timeout:g} s")


class Worker:
    """A thread that ends with the program even if its function never returns."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="calls", daemon=True).start()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Calls a function after those submitted before; the future cannot be cancelled."""
        future: Future[Any] = Future()
        self._calls.put((future, function, arguments))
        return future

    def end(self) -> None:
        """Ends the thread behind what was submitted; does not wait for it."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, arguments = call
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # it belongs to the caller, whatever it is
                future.set_exception(error)
