"""Several processes that run one program: process 0 leads, the others follow.

All run the same Python and start the same programs on the same mesh in the same order. What only
one of them may do, such as reading data, asking servers and writing files, process 0 does in
`Hosts.led`; what comes of it reaches all.
"""

import os
import pickle
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")
R = TypeVar("R")

_SMALLEST = 4096  # bytes; a program is compiled for every size


class ReportedError(RuntimeError):
    """An error that the user has been told of."""


class _Call(NamedTuple):
    number: int
    arguments: tuple[Any, ...]
    named: dict[str, Any]


class _Failure(NamedTuple):
    text: str


class _Outcome(NamedTuple):
    value: Any


def report(error: Exception) -> None:
    """Says on the error output which process ends, and why."""
    if os.environ.get("JAXRL_TRACEBACK"):
        traceback.print_exc()
    print(
        f"jaxrl: process {jax.process_index()} of {jax.process_count()} ends: {error}\nAll "
        "processes of the run end with it. If the error is that of a connection, another process "
        "ended before; see its output. The same commands go on from the last checkpoint",
        file=sys.stderr,
        flush=True,
    )


class Hosts:
    """The processes of this program; on a single one every method is as if it were not there.

    Attributes:
      index: of this process.
      count: of all.
    """

    def __init__(self) -> None:
        self.index, self.count = jax.process_index(), jax.process_count()
        self._functions: list[Callable[..., Any]] = []
        self._leading = False

    @property
    def leads(self) -> bool:
        """Whether this is process 0."""
        return self.index == 0

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Says what fails in the block before anything is closed: that may wait for the others.

        Raises:
          ReportedError: in the place of any error, over several processes.
        """
        try:
            yield
        except Exception as error:
            if self.count == 1:
                raise
            report(error)
            raise ReportedError(str(error)) from error

    def share(self, value: T) -> T:
        """What process 0 gives, on all of them; all must call it."""
        if self.count == 1:
            return value
        data = pickle.dumps(value) if self.leads else b""
        size = int(multihost_utils.broadcast_one_to_all(np.uint32(len(data))))
        room = max(_SMALLEST, 1 << (size - 1).bit_length())
        buffer = np.zeros(room, np.uint8)
        if self.leads:
            buffer[:size] = np.frombuffer(data, np.uint8)
        found = multihost_utils.broadcast_one_to_all(buffer)
        return value if self.leads else pickle.loads(np.asarray(found)[:size].tobytes())

    def largest(self, number: int) -> int:
        """Over all processes; all must call it."""
        if self.count == 1:
            return number
        return int(multihost_utils.process_allgather(np.int32(number)).max())

    def together(self, function: Callable[..., R]) -> Callable[..., R]:
        """The function, run by all processes whenever process 0 calls it while it leads.

        For programs on the devices of all. All processes must make the same functions in the same
        order. Arguments travel pickled; what it returns on the others is dropped.
        """
        if self.count == 1:
            return function
        number = len(self._functions)
        self._functions.append(function)

        def call(*arguments: Any, **named: Any) -> R:
            if self._leading:
                self.share(_Call(number, arguments, named))
            return function(*arguments, **named)

        return call

    def led(self, function: Callable[[], R]) -> R:
        """What the function returns on process 0, which alone runs it, on all of them; all must
        call it. The others run what of `together` it calls.

        Raises:
          RuntimeError: on the others, if it fails on process 0.
        """
        if self.count == 1 or self._leading:
            return function()
        if self.leads:
            return self._lead(function)
        while True:
            message: Any = self.share(None)
            if isinstance(message, _Call):
                self._functions[message.number](*message.arguments, **message.named)
            elif isinstance(message, _Failure):
                raise RuntimeError(f"process 0: {message.text}")
            else:
                return message.value

    def _lead(self, function: Callable[[], R]) -> R:
        self._leading = True
        try:
            found = function()
        except Exception as error:
            with suppress(Exception):  # the error may be that nobody can be reached
                self.share(_Failure(str(error)))
            raise
        finally:
            self._leading = False
        self.share(_Outcome(found))
        return found

    def consumed(self, source: Iterable[T], function: Callable[[Iterable[T]], R]) -> R | None:
        """`function(source)` on process 0; None on the others, which iterate over the source, too:
        for one whose items all processes make together. It must be iterated over once."""
        if self.leads:
            return function(source)
        deque(source, maxlen=0)
        return None
