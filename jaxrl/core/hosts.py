"""Coordination of the processes of one run: process 0 leads, the others follow.

All processes run the same Python code and start the same compiled programs in the same order. Work
for one process only, such as reading data, querying servers and writing files, runs in
`Hosts.on_leader`, which broadcasts its result.
"""

import os
import pickle
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl.core.buckets import count_bucket

T = TypeVar("T")
R = TypeVar("R")

_SMALLEST = 4096  # bytes; each size compiles a program


class ReportedError(RuntimeError):
    """An error that `report` has printed already."""


def report(error: Exception) -> None:
    """Prints to stderr that this process failed, with the error."""
    if os.environ.get("JAXRL_TRACEBACK"):
        traceback.print_exc()
    print(
        f"jaxrl: process {jax.process_index()} of {jax.process_count()} failed: {error}\nAll "
        "processes of the run end with it. If this is a connection error, another process failed "
        "first; see its output. Run the same commands to resume from the last checkpoint",
        file=sys.stderr,
        flush=True,
    )


class Hosts:
    """The processes of a run, `count` of them; with one process every method is a no-op."""

    def __init__(self) -> None:
        self.index, self.count = jax.process_index(), jax.process_count()
        self._functions: list[Callable[..., Any]] = []
        self._leading = False

    @property
    def leads(self) -> bool:
        """True on process 0."""
        return self.index == 0

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Prints an error of the block before its cleanup, which may wait for other processes.

        Raises:
          ReportedError: instead of any other error, with several processes.
        """
        try:
            yield
        except Exception as error:
            if self.count == 1:
                raise
            report(error)
            raise ReportedError(str(error)) from error

    def share(self, value: T) -> T:
        """Returns the value of process 0 on every process; all must call it."""
        if self.count == 1:
            return value
        data = pickle.dumps(value) if self.leads else b""
        size = int(multihost_utils.broadcast_one_to_all(np.uint32(len(data))))
        room = count_bucket(size, multiple=_SMALLEST)
        buffer = np.zeros(room, np.uint8)
        if self.leads:
            buffer[:size] = np.frombuffer(data, np.uint8)
        found = multihost_utils.broadcast_one_to_all(buffer)
        return value if self.leads else pickle.loads(np.asarray(found)[:size].tobytes())

    def gather(self, value: T) -> list[T]:
        """Returns the values of all processes on every process; all must call it."""
        if self.count == 1:
            return [value]
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = multihost_utils.process_allgather(np.uint32(data.size))
        room = count_bucket(int(sizes.max()), multiple=_SMALLEST)
        padded = np.pad(data, (0, room - data.size))
        rows = np.asarray(multihost_utils.process_allgather(padded))
        return [pickle.loads(row[:n].tobytes()) for row, n in zip(rows, sizes, strict=True)]

    def largest(self, number: int) -> int:
        """Returns the largest number over all processes; all must call it."""
        if self.count == 1:
            return number
        return int(multihost_utils.process_allgather(np.int32(number)).max())

    def on_all(self, function: Callable[..., R]) -> Callable[..., R]:
        """Wraps a function so that all processes run it when process 0 calls it in `on_leader`.

        For programs on the devices of all processes; all must wrap the same functions in the same
        order. Arguments are pickled; results on the other processes are dropped.
        """
        if self.count == 1:
            return function
        number = len(self._functions)
        self._functions.append(function)

        def call(*arguments: Any, **named: Any) -> R:
            if self._leading:
                self.share(("call", number, arguments, named))
            return function(*arguments, **named)

        return call

    def on_leader(self, function: Callable[[], R]) -> R:
        """Runs a function on process 0 and returns its result on every process; all must call it.
        Meanwhile the others run the `on_all` functions that it calls.

        Raises:
          RuntimeError: on the other processes, if the function fails on process 0.
        """
        if self.count == 1 or self._leading:
            return function()
        if self.leads:
            return self._lead(function)
        while True:
            match self.share(None):
                case ("call", number, arguments, named):
                    self._functions[number](*arguments, **named)
                case ("failure", text):
                    raise RuntimeError(f"process 0: {text}")
                case ("result", found):
                    return found

    def _lead(self, function: Callable[[], R]) -> R:
        self._leading = True
        try:
            found = function()
        except Exception as error:
            with suppress(Exception):  # the error may be that no process can be reached
                self.share(("failure", str(error)))
            raise
        finally:
            self._leading = False
        self.share(("result", found))
        return found

    def consume_on_leader(
        self, source: Iterable[T], function: Callable[[Iterable[T]], R]
    ) -> R | None:
        """Returns `function(source)` on process 0 and None on the others.

        All processes compute the items together, so the others iterate over the source too.
        `function` must iterate over it exactly once.
        """
        if self.leads:
            return function(source)
        deque(source, maxlen=0)
        return None
