"""Clients of a store, whose time-outs are short at first and grow while it does not answer."""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Make = Callable[[Any, Any], Any]
"""(client options, retry options) -> client, as obstore's `from_url`."""
_Kind = Literal["read_timeout", "timeout"]  # without a byte of the answer; for the whole request

# Seconds of the first try, the second, ... A client repeats errors of the connection and of the
# server (5xx) for as long. To write an object takes long on a slow link, a byte of an answer not.
_READ, _WRITE = (5, 10, 20, 20, 20), (5, 10, 20, 60)
_LONGEST = timedelta(minutes=10)  # of an object whose bytes arrive


class Silence:
    """Measures how long requests to a store have gone without an answer."""

    def __init__(self) -> None:
        """Begins without a request."""
        self._lock = threading.Lock()
        self._open = 0  # requests in progress
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the last byte from the store, or since the first request after it; 0 if
        every request has its answer."""
        with self._lock:
            return 0.0 if self._since is None else time.monotonic() - self._since

    def begin(self) -> None:
        """Records a request."""
        with self._lock:
            self._open += 1
            self._since = time.monotonic() if self._since is None else self._since

    def heard(self) -> None:
        """Records that a part of an answer has arrived."""
        with self._lock:
            self._since = time.monotonic()

    def end(self, *, answered: bool) -> None:
        """Records the end of a request."""
        with self._lock:
            self._open -= 1
            if answered:
                self._since = time.monotonic() if self._open else None


class Clients:
    """Clients of a store, one for each time-out.

    Attributes:
      silence: of all their requests.
    """

    def __init__(self, make: Make) -> None:
        """Makes the first client, by `make`."""
        self._make, self.silence = make, Silence()
        self._client = functools.cache(self._new)
        self._first = 0  # the time-out that was long enough for the last object written
        self._client("read_timeout", _READ[0])

    def read(self, call: Callable[[Any], T]) -> T:
        """Returns `call(client)`; raises its error if the store refuses, or does not answer within
        the longest time-out."""
        return self._attempt(call, "read_timeout", _READ)[0]

    def write(self, call: Callable[[Any], T]) -> T:
        """Returns `call(client)`, which sends an object; raises as `read`."""
        first = self._first
        found, i = self._attempt(call, "timeout", _WRITE[first:])
        self._first = first + i
        return found

    def once(self, call: Callable[[Any], T]) -> T:
        """Returns `call(client)`; raises as `read`, but with the shortest time-out."""
        return self._attempt(call, "read_timeout", _READ[:1])[0]

    def hasty(self) -> Any:
        """Returns a client with the shortest time-out that repeats nothing."""
        return self._make({"read_timeout": timedelta(seconds=_READ[0])}, {"max_retries": 0})

    def _attempt(
        self, call: Callable[[Any], T], kind: _Kind, seconds: Sequence[int]
    ) -> tuple[T, int]:
        """Returns what `call` returns, and the number of tries before."""
        if self.silence.seconds >= sum(_READ):  # the store has been waited for already
            seconds = seconds[:1]
        for i, limit in enumerate(seconds):
            start, answered = time.monotonic(), True
            self.silence.begin()
            try:
                return call(self._client(kind, limit)), i
            except Exception:
                # A client returns a refusal at once, and repeats all else until its time is up.
                answered = time.monotonic() - start < limit
                if answered or i + 1 == len(seconds):
                    raise
            finally:
                self.silence.end(answered=answered)
        raise AssertionError("no time-out")

    def _new(self, kind: _Kind, seconds: int) -> Any:
        limit = timedelta(seconds=seconds)
        # `retry_timeout` alone ends the tries: the pauses between them are random.
        return self._make(
            {"timeout": _LONGEST, kind: limit}, {"max_retries": 1000, "retry_timeout": limit}
        )
