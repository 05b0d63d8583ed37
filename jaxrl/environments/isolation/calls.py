"""Calls of user functions with a timeout; a failure affects only that call."""

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

_ASYNC_CALLS = 64  # of one function at once
_PROCESSORS = os.cpu_count() or 1
_USES_PROCESSES = "_jaxrl_uses_processes"

# More processes than processors would only slow each other down, each against its own deadline.
_free = threading.BoundedSemaphore(_PROCESSORS)


def use_processors(count: int) -> None:
    """Sets how many of the machine's processors this program's calls may hold at a time; by default
    all. Call it before the first call."""
    global _PROCESSORS, _free
    _PROCESSORS, _free = count, threading.BoundedSemaphore(count)


class Deadline:
    """The time left for a call; waiting for a processor does not count."""

    def __init__(self, seconds: float) -> None:
        """Starts the clock."""
        self._until = time.monotonic() + seconds
        self._lock, self._pauses, self._since = threading.Lock(), 0, 0.0

    def remaining(self) -> float:
        """Returns the seconds left, 0 if there are none."""
        with self._lock:
            if self._pauses:
                # At least a second: the clock stands still, so the caller should not poll fast.
                return max(1.0, self._until - self._since)
            return max(0.0, self._until - time.monotonic())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stops the clock during the block."""
        with self._lock:
            self._since = self._since if self._pauses else time.monotonic()
            self._pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                if not self._pauses:
                    self._until += time.monotonic() - self._since


# Of the call that runs in the current thread or task.
_deadline: contextvars.ContextVar[Deadline | None] = contextvars.ContextVar(
    "deadline", default=None
)


@contextlib.contextmanager
def hold_processor() -> Iterator[None]:
    """Holds one of the machine's processors for a block that starts a process and waits for it. The
    wait for a free processor does not count against the deadline of the current call."""
    deadline = _deadline.get()
    with deadline.paused() if deadline is not None else contextlib.nullcontext():
        _free.acquire()
    try:
        yield
    finally:
        _free.release()


def uses_processes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function whose work other processes do: a decorator. `call_each` calls it in as many
    threads as there are processors."""
    setattr(function, _USES_PROCESSES, True)
    return function


def call_each(
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    *,
    timeout: float,
    convert: Callable[[Any], Any] = lambda found: found,
) -> list[Any]:
    """Calls a function once for each tuple of arguments, and `convert` with each result.

    Calls run one after the other in one thread. If the function is marked by `uses_processes`, one
    call per processor runs in parallel; if it is asynchronous, up to 64 calls. Python cannot end a
    thread: a call that times out keeps running in its daemon thread, and the following calls run in
    a new one.

    Returns:
      For each call its result, or the exception that it raised, SystemExit included; TimeoutError
      if call and conversion took more than `timeout` seconds.
    """
    if inspect.iscoroutinefunction(function):
        return _call_async(function, arguments, timeout=timeout, convert=convert)

    def now(*given: Any) -> Any:
        return convert(function(*given))

    if not hasattr(function, _USES_PROCESSES):
        outcomes = list[Any]()
        while len(outcomes) < len(arguments):
            rest = arguments[len(outcomes) :]
            outcomes += _call_in_turn(now, rest, timeout=timeout)
        return outcomes

    def call(given: tuple[Any, ...]) -> Any:
        return _call_in_turn(now, [given], timeout=timeout)[0]

    # Threads only wait here: the work is done by the processes that they start.
    threads = ThreadPoolExecutor(_PROCESSORS)
    try:
        return list(threads.map(call, arguments))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _call_in_turn(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], *, timeout: float
) -> list[Any]:
    """Makes calls in turn in one thread, and returns the result or exception of each. Stops after
    the first call that takes too long, whose outcome is a TimeoutError.

    While another thread computes, Python takes 5 ms to switch to a new thread, and 5 ms to switch
    back. One thread for all calls pays this once, not once per call.
    """
    lock, outcomes, abandoned = threading.Lock(), list[Any](), False
    deadline = Deadline(timeout)  # of the call that runs

    def call(given: tuple[Any, ...]) -> Any:
        _deadline.set(deadline)
        try:
            return function(*given)
        except BaseException as error:  # the caller handles it, whatever it is
            return error

    def work() -> None:
        nonlocal deadline
        for given in arguments:
            outcome = contextvars.copy_context().run(call, given)
            with lock:
                if abandoned:
                    return
                outcomes.append(outcome)
                deadline = Deadline(timeout)

    future = run_in_thread(work)
    try:
        while not future.done():
            waited_for = deadline
            if seconds := waited_for.remaining():
                wait([future], seconds)
                continue
            with lock:
                if deadline is waited_for:  # no other call has begun
                    abandoned = True
                    return [*outcomes, _too_long(timeout)]
        return outcomes
    finally:
        abandoned = True


def _call_async(
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    *,
    timeout: float,
    convert: Callable[[Any], Any],
) -> list[Any]:
    free = asyncio.Semaphore(_ASYNC_CALLS)

    async def outcome(call: tuple[Any, ...]) -> Any:
        try:
            return convert(await function(*call))
        # The deadline cancels the call; a cancellation must not become a result.
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit would end the loop and all other calls
            return error

    async def limited(call: tuple[Any, ...]) -> Any:
        async with free:
            deadline = Deadline(timeout)
            _deadline.set(deadline)
            try:
                return await wait_for(outcome(call), deadline)
            except TimeoutError:
                return _too_long(timeout)

    async def call_all() -> list[Any]:
        return await asyncio.gather(*map(limited, arguments), return_exceptions=True)

    # One more timeout, because a call that blocks the event loop delays all others.
    seconds = (1 - (-len(arguments) // _ASYNC_CALLS)) * timeout
    (outcomes,) = _call_in_turn(asyncio.run, [(call_all(),)], timeout=seconds)
    return [outcomes] * len(arguments) if isinstance(outcomes, BaseException) else outcomes


async def wait_for(awaitable: Awaitable[Any], deadline: Deadline) -> Any:
    """Awaits a result; at the deadline cancels it and raises TimeoutError."""
    future = asyncio.ensure_future(awaitable)
    try:
        while not future.done() and (seconds := deadline.remaining()):
            await asyncio.wait([future], timeout=seconds)
        if not future.done():
            raise TimeoutError
        return future.result()
    finally:
        future.cancel()


def _too_long(timeout: float) -> TimeoutError:
    return TimeoutError(f"it took longer than {timeout:g} s")


def run_in_thread(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Makes one call, as `Worker.submit`, in a new daemon thread."""
    worker = Worker()
    future = worker.submit(function, *arguments)
    worker.end()
    return future


class Worker:
    """A daemon thread, which ends with the program even if its function never returns."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="calls", daemon=True).start()

    def submit(
        self, function: Callable[..., Any], *arguments: Any, deadline: Deadline | None = None
    ) -> Future[Any]:
        """Queues a call; its future cannot be cancelled. `hold_processor` pauses the deadline."""
        future: Future[Any] = Future()
        self._calls.put((future, deadline, function, arguments))
        return future

    def end(self) -> None:
        """Ends the thread after the queued calls, without waiting for them."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, deadline, function, arguments = call
            _deadline.set(deadline)
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # the caller handles it, whatever it is
                future.set_exception(error)
