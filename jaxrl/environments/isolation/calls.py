"""Calls of other people's functions: what raises or hangs costs its own result and no other."""

import asyncio
import contextlib
import contextvars
import inspect
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

_AT_ONCE = 64  # calls of an asynchronous function
_PROCESSORS = os.cpu_count() or 1
_SIDE_BY_SIDE = "_jaxrl_side_by_side"

# More processes at once than processors only take longer, each of them on its own clock.
_free = threading.BoundedSemaphore(_PROCESSORS)


class Clock:
    """What a call may still take. The time in which it waits for a processor does not count."""

    def __init__(self, seconds: float) -> None:
        """Begins to count."""
        self._until = time.monotonic() + seconds
        self._lock, self._waiting, self._since = threading.Lock(), 0, 0.0

    def left(self) -> float:
        """Seconds, 0 if there are none left."""
        with self._lock:
            if self._waiting:
                return max(1.0, self._until - self._since)
            return max(0.0, self._until - time.monotonic())

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Does not count the time of the block."""
        with self._lock:
            self._since = self._since if self._waiting else time.monotonic()
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    self._until += time.monotonic() - self._since


# Of the call that is going on in a thread, or in a task.
_clock: contextvars.ContextVar[Clock | None] = contextvars.ContextVar("clock", default=None)


@contextlib.contextmanager
def processor() -> Iterator[None]:
    """Holds one of the machine's processors for the block, which starts a process and waits for it.
    The time until one is free is not counted against the call in which that happens."""
    clock = _clock.get()
    with clock.stopped() if clock is not None else contextlib.nullcontext():
        _free.acquire()
    try:
        yield
    finally:
        _free.release()


def side_by_side(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function whose work is done by processes: a decorator. `call_each` calls it from as
    many threads as there are processors."""
    setattr(function, _SIDE_BY_SIDE, True)
    return function


def call_each(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], *, timeout: float
) -> list[Any]:
    """Calls a function with each of several arguments: one after the other, marked by
    `side_by_side` as many at once as there are processors, asynchronous up to 64 at once.

    A call that takes too long is left alone in a thread that does not keep the program from ending:
    Python cannot end it.

    Args:
      function: `def` or `async def`.
      arguments: of each call.
      timeout: seconds that a call may take.

    Returns:
      For each call its result, or the exception that it raised, also one that would end a program;
      TimeoutError if it took too long.
    """
    if inspect.iscoroutinefunction(function):
        return _at_once(function, arguments, timeout=timeout)
    if not hasattr(function, _SIDE_BY_SIDE):
        return _one_by_one(function, arguments, timeout=timeout)
    threads = ThreadPoolExecutor(_PROCESSORS)
    try:
        calls = [threads.submit(_one_by_one, function, [one], timeout=timeout) for one in arguments]
        return [call.result()[0] for call in calls]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _one_by_one(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], *, timeout: float
) -> list[Any]:
    outcomes: list[Any] = []
    worker = Worker()
    try:
        for one in arguments:
            clock = Clock(timeout)
            future = worker.submit(function, *one, clock=clock)
            outcomes.append(_outcome(future, clock, timeout=timeout))
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

        async def called(call: tuple[Any, ...]) -> Any:
            try:
                return await function(*call)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # SystemExit would end the loop, and with it all others
                return error

        async def one(call: tuple[Any, ...]) -> Any:
            async with free:
                clock = Clock(timeout)
                _clock.set(clock)
                try:
                    return await within(called(call), clock)
                except TimeoutError:
                    return _too_long(timeout)

        return await asyncio.gather(*map(one, arguments), return_exceptions=True)

    worker = Worker()
    try:
        rounds = -(-len(arguments) // _AT_ONCE)
        # A call that blocks the event loop holds up all others; one more limit for that.
        clock = Clock((rounds + 1) * timeout)
        future = worker.submit(asyncio.run, everything())
        found = _outcome(future, clock, timeout=(rounds + 1) * timeout)
    finally:
        worker.end()
    return [found] * len(arguments) if isinstance(found, BaseException) else found


def _outcome(future: Future[Any], clock: Clock, *, timeout: float) -> Any:
    while not future.done() and (left := clock.left()):
        wait([future], left)
    if not future.done():
        return _too_long(timeout)
    error = future.exception()
    return future.result() if error is None else error


async def within(awaited: Awaitable[Any], clock: Clock) -> Any:
    """Waits as long as the clock allows.

    Raises:
      TimeoutError: if that is not enough; what was waited for is cancelled.
    """
    future = asyncio.ensure_future(awaited)
    try:
        while not future.done() and (left := clock.left()):
            await asyncio.wait([future], timeout=left)
        if not future.done():
            raise TimeoutError
        return future.result()
    finally:
        future.cancel()


def _too_long(timeout: float) -> TimeoutError:
    return TimeoutError(f"it took longer than {timeout:g} s")


class Worker:
    """A thread that ends with the program even if its function never returns."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="calls", daemon=True).start()

    def submit(
        self, function: Callable[..., Any], *arguments: Any, clock: Clock | None = None
    ) -> Future[Any]:
        """Calls a function after those submitted before; the future cannot be cancelled. The clock
        is the one that `processor` stops."""
        future: Future[Any] = Future()
        self._calls.put((future, clock, function, arguments))
        return future

    def end(self) -> None:
        """Ends the thread behind what was submitted; does not wait for it."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, clock, function, arguments = call
            _clock.set(clock)
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # it belongs to the caller, whatever it is
                future.set_exception(error)
