"""Requests to one or many servers: which one takes a request, and what happens when it is lost.

Requests wait here, not in a server: each server has at most `max_requests` at a time, each on a
connection that stays open. The server with the fewest takes the next one, so a slow server gets
fewer. What goes on from something that a server has in its cache goes there, unless that one has
much more to do.
"""

import contextlib
import http.client
import itertools
import socket
import threading
import urllib.parse
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from http.client import HTTPConnection
from typing import Literal, NamedTuple, TypeVar

from jaxrl.sampling.base import ClosedError

_ATTEMPTS = 4  # the first and three more, after 0.5, 1 and 2 seconds

T = TypeVar("T")


class SamplerError(RuntimeError):
    """A server did not answer, or its answer is none; the message has its own words."""


class StrangerError(SamplerError):
    """The server is not the one that it was: it holds weights that no learner has published."""


class _Address(NamedTuple):
    host: str
    port: int


class _Answer(NamedTuple):
    status: int  # 0 if there is none
    text: str
    fate: Literal["answered", "gone", "hangs"] = "answered"


class Router:
    """Connections to servers that do the same work.

    A server that is lost gets no more requests until `restore` names it; those that it had are sent
    to others. When the last is lost, all that were named last are tried again, and after some
    attempts requests fail. One that was not named is not asked: it may hold weights of steps that
    the run has gone back behind.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        max_requests: int,
        timeout: float,
        headers: Mapping[str, str],
    ) -> None:
        """Does not connect yet.

        Args:
          urls: addresses of the servers.
          max_requests: that each has at a time.
          timeout: seconds until one is given up.
          headers: of every request.

        Raises:
          ValueError: for a URL that is none, or no URL at all.
        """
        if not urls:
            raise ValueError("urls is empty; a sampler needs a server")
        self._headers = {"Content-Type": "application/json", **headers}
        self._named = self._serving = {_address(url) for url in urls}
        self._most, self._margin = max_requests, max(1, max_requests // 8)
        self._idle = {
            address: [HTTPConnection(*address, timeout=timeout) for _ in range(max_requests)]
            for address in map(_address, urls)
        }
        self._connections = [*itertools.chain.from_iterable(self._idle.values())]
        self._places: dict[Hashable, _Address] = {}
        self._numbers = itertools.count()
        self._latest = {address: next(self._numbers) for address in self._idle}
        self._changed = threading.Condition()  # guards all of these
        self._closed = threading.Event()

    def post(
        self,
        path: str,
        body: str,
        *,
        read: Callable[[str], T],
        about: str,
        keys: Sequence[Hashable] = (),
    ) -> T:
        """What `read` makes of the answer; waits for a connection, and tries several times.

        Args:
          path: of every server.
          body: JSON.
          read: raises StrangerError for a server that must not be asked.
          about: what the request is about, for error messages.
          keys: what it goes on from: the server that was asked last with the first one is
            preferred. Later requests with any of them go on from this one.

        Raises:
          SamplerError: if a server refuses the request, or none answers it.
        """
        failures, failed = 0, None
        while True:
            with self._connection(keys, failed) as connection:
                answer = self._exchange(connection, path, body)
                if answer.status == 200:
                    try:
                        return read(answer.text)
                    except StrangerError:
                        if self._give_up(connection):
                            continue
                        raise
                connection.close()  # the next request on it opens it again
                if _is_lost(answer) and self._give_up(connection):
                    continue
            failures, failed = failures + 1, _of(connection)
            final = 400 <= answer.status < 500 or failures == _ATTEMPTS
            if final or self._closed.wait(0.5 * 2 ** (failures - 1)):
                raise SamplerError(
                    f"http://{connection.host}:{connection.port} did not answer {about}: "
                    f"{answer.status or ''} {answer.text}"
                )

    def restore(self, urls: Sequence[str]) -> None:
        """Sends requests to these servers and to no others: what the others have is sent again. A
        server that stays paused would keep it until the time is over.

        Who has what in its cache is forgotten, because new weights have made it useless.
        """
        with self._changed:
            self._named = self._serving = {_address(url) for url in urls}
            self._places.clear()
            self._changed.notify_all()
        _shut(c for c in self._connections if _of(c) not in self._named)

    def hang_up(self) -> None:
        """Lets servers drop what is in flight; requests that wait for an answer fail."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        _shut(self._connections)

    def close(self) -> None:
        """Closes the connections, which nobody may be using."""
        for connection in self._connections:
            connection.close()

    def _exchange(self, connection: HTTPConnection, path: str, body: str) -> _Answer:
        """A request on a connection. That a server has dropped one which was kept open says nothing
        about the server, and how many of them there are must not use up the attempts of a request:
        only a connection that was just opened tells that nobody is there."""
        kept = connection.sock is not None
        answer = _post(connection, path, body, headers=self._headers)
        wanted = _of(connection) in self._serving and not self._closed.is_set()
        if kept and answer.fate == "gone" and wanted:
            connection.close()
            answer = _post(connection, path, body, headers=self._headers)
        return answer

    @contextlib.contextmanager
    def _connection(
        self, keys: Sequence[Hashable], failed: _Address | None
    ) -> Iterator[HTTPConnection]:
        with self._changed:
            while not (free := [address for address in self._serving if self._idle[address]]):
                if self._closed.is_set():
                    break
                self._changed.wait()
            if self._closed.is_set():
                raise ClosedError("the sampler was closed")
            # A server that has just failed is asked again only if there is no other.
            chosen = self._choose([a for a in free if a != failed] or free, keys)
            self._latest[chosen] = next(self._numbers)
            self._places |= dict.fromkeys(keys, chosen)
            connection = self._idle[chosen].pop()
        try:
            yield connection
        finally:
            with self._changed:
                self._idle[chosen].append(connection)
                self._changed.notify()

    def _choose(self, free: Sequence[_Address], keys: Sequence[Hashable]) -> _Address:
        """The one that has what a request goes on from; or the least loaded, in turn."""
        loads = {address: self._most - len(self._idle[address]) for address in free}
        place = self._places.get(keys[0]) if keys else None
        limit = min(loads.values()) + self._margin
        if place is not None and loads.get(place, limit + 1) <= limit:
            return place
        return min(free, key=lambda address: (loads[address], self._latest[address]))

    def _give_up(self, connection: HTTPConnection) -> bool:
        """Whether another server is left to go on with. If none is, all are tried again."""
        with self._changed:
            others = self._serving - {_of(connection)}
            left = bool(others) and not self._closed.is_set()
            self._serving = others if left else self._named
            self._changed.notify_all()
        return left


def _is_lost(answer: _Answer) -> bool:
    # One that has never heard of the route or of the adapter was started again; one whose engine
    # has died answers 500 until it ends, faster than any other could.
    return answer.fate != "answered" or answer.status in (404, 500)


def _shut(connections: Iterable[HTTPConnection]) -> None:
    """Whoever waits for an answer on one of these finds that there will be none."""
    for connection in connections:
        if connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)


def _post(
    connection: HTTPConnection, path: str, body: str, *, headers: Mapping[str, str]
) -> _Answer:
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return _Answer(response.status, response.read().decode(errors="replace"))
    except TimeoutError as error:
        return _Answer(0, repr(error), "hangs")
    except (OSError, http.client.HTTPException) as error:
        return _Answer(0, repr(error), "gone")


def _of(connection: HTTPConnection) -> _Address:
    return _Address(connection.host, connection.port)


def _address(url: str) -> _Address:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"{url!r} is not the http:// address of a server")
    return _Address(parts.hostname, parts.port or 80)
