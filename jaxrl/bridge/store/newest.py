"""Tasks of which only the newest counts."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Task(NamedTuple, Generic[T]):
    key: Any
    run: Callable[[], T]
    future: Future[T | None]


class Newest(Generic[T]):
    """Runs one task at a time, in a thread of its own. The newest is next; its result is None for
    those that it replaces."""

    def __init__(self) -> None:
        """Begins without a task."""
        self._lock = threading.Lock()
        self._running: _Task[T] | None = None
        self._next: _Task[T] | None = None

    @property
    def waiting(self) -> bool:
        """True if a newer task waits for the one that runs."""
        return self._next is not None

    def submit(self, key: Any, run: Callable[[], T]) -> Future[T | None]:
        """Returns the future of a task, or of the one with an equal key that has not ended."""
        with self._lock:
            for task in (self._running, self._next):
                if task is not None and task.key == key:
                    return task.future
            task = _Task(key, run, Future[T | None]())
            if self._running is None:
                self._running = task
                threading.Thread(target=self._work, args=[task], daemon=True).start()
            else:
                if self._next is not None:
                    self._next.future.set_result(None)
                self._next = task
            return task.future

    def _work(self, task: _Task[T]) -> None:
        following: _Task[T] | None = task
        while following is not None:
            task, outcome = following, Future[T | None]()
            try:
                outcome.set_result(task.run())
            except Exception as error:
                outcome.set_exception(error)
            with self._lock:  # before a waiting thread submits it again
                following = self._running = self._next
                self._next = None
            if (error := outcome.exception()) is None:
                task.future.set_result(outcome.result())
            else:
                task.future.set_exception(error)
