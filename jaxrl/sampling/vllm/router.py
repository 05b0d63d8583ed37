"""Requests to one or many servers: which one takes a request, and what happens when it is lost.

Requests wait here, not in a server: each server has at most `max_requests` at a time, each on a
connection that stays open. The server with the fewest takes the next one, so a slow server gets
fewer. What goes on from something that a server has in its cache goes there, unless that one has
much more to do.
"""

import contextlib
import functools
import itertools
import socket
import threading
import urllib.parse
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import httpx2

from jaxrl.sampling.base import ClosedError

_ATTEMPTS = 4  # the first and three more, after 0.5, 1 and 2 seconds

T = TypeVar("T")


class SamplerError(RuntimeError):
    """A server did not answer, or its answer is none; the message has its own words."""


class StrangerError(SamplerError):
    """The server is not the one that it was: it holds weights that no learner has published."""


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
        self._clients = {url: _client(url, timeout=timeout, headers=headers) for url in urls}
        self._named = self._serving = set(urls)
        self._most, self._margin = max_requests, max(1, max_requests // 8)
        self._loads: Counter[str] = Counter()
        self._sockets = {url: weakref.WeakSet[socket.socket]() for url in urls}
        self._places: dict[Hashable, str] = {}
        self._numbers = itertools.count()
        self._latest = {url: next(self._numbers) for url in urls}
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
            with self._server(keys, failed) as url:
                status, text = self._exchange(url, path, body)
                if status == 200:
                    try:
                        return read(text)
                    except StrangerError:
                        if self._give_up(url):
                            continue
                        raise
                # One that does not know the route or the adapter was started again. One whose
                # engine has died answers 500 until it ends, faster than any other could.
                if status in (0, 404, 500) and self._give_up(url):
                    continue
            failures, failed = failures + 1, url
            final = 400 <= status < 500 or failures == _ATTEMPTS
            if final or self._closed.wait(0.5 * 2 ** (failures - 1)):
                raise SamplerError(f"{url} did not answer {about}: {status or ''} {text}")

    def restore(self, urls: Sequence[str]) -> None:
        """Sends requests to these servers and to no others: what the others have is sent again. A
        server that stays paused would keep it until the time is over.

        Who has what in its cache is forgotten, because new weights have made it useless.
        """
        with self._changed:
            self._named = self._serving = set(urls)
            self._places.clear()
            self._changed.notify_all()
            self._shut(self._clients.keys() - self._named)

    def hang_up(self) -> None:
        """Lets servers drop what is in flight; requests that wait for an answer fail."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
            self._shut(self._clients)

    def close(self) -> None:
        """Closes the connections, which nobody may be using."""
        for client in self._clients.values():
            client.close()

    def _exchange(self, url: str, path: str, body: str) -> tuple[int, str]:
        """Returns the status and the text of a server's answer; 0 and the error if there is none.

        A request whose connection breaks is sent once more: the server may have been about to close
        a connection that was idle, which says nothing about the server.
        """
        note = functools.partial(self._note, url)
        send = functools.partial(
            self._clients[url].post, path, content=body, extensions={"trace": note}
        )
        try:
            try:
                answer = send()
            except (httpx2.ReadError, httpx2.RemoteProtocolError):
                if url not in self._serving or self._closed.is_set():
                    raise
                answer = send()
        except httpx2.RequestError as error:
            return 0, repr(error)
        return answer.status_code, answer.text

    def _note(self, url: str, event: str, details: Mapping[str, Any]) -> None:
        """Keeps the sockets that a client opens: closing a client wakes no thread that waits."""
        if event == "connection.connect_tcp.complete":
            with self._changed:
                self._sockets[url].add(details["return_value"].get_extra_info("socket"))
                if url not in self._named or self._closed.is_set():
                    self._shut([url])

    def _shut(self, urls: Iterable[str]) -> None:
        """Ends the connections to servers; whoever waits for an answer on one gets an error."""
        for connection in itertools.chain.from_iterable(self._sockets[url] for url in urls):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _server(self, keys: Sequence[Hashable], failed: str | None) -> Iterator[str]:
        """Waits for a server with less than `max_requests` requests and counts one more."""
        with self._changed:
            while not (free := [url for url in self._serving if self._loads[url] < self._most]):
                if self._closed.is_set():
                    break
                self._changed.wait()
            if self._closed.is_set():
                raise ClosedError("the sampler was closed")
            # A server that has just failed is asked again only if there is no other.
            chosen = self._choose([url for url in free if url != failed] or free, keys)
            self._latest[chosen] = next(self._numbers)
            self._places |= dict.fromkeys(keys, chosen)
            self._loads[chosen] += 1
        try:
            yield chosen
        finally:
            with self._changed:
                self._loads[chosen] -= 1
                self._changed.notify()

    def _choose(self, free: Sequence[str], keys: Sequence[Hashable]) -> str:
        """The one that has what a request goes on from; or the least loaded, in turn."""
        place = self._places.get(keys[0]) if keys else None
        limit = min(self._loads[url] for url in free) + self._margin
        if place is not None and place in free and self._loads[place] <= limit:
            return place
        return min(free, key=lambda url: (self._loads[url], self._latest[url]))

    def _give_up(self, url: str) -> bool:
        """Whether another server is left to go on with. If none is, all are tried again."""
        with self._changed:
            others = self._serving - {url}
            left = bool(others) and not self._closed.is_set()
            self._serving = others if left else self._named
            self._changed.notify_all()
        return left


def _client(url: str, *, timeout: float, headers: Mapping[str, str]) -> httpx2.Client:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"{url!r} is not the http:// address of a server")
    return httpx2.Client(
        base_url=f"http://{parts.netloc}",
        headers={"Content-Type": "application/json", **headers},
        timeout=timeout,
        limits=httpx2.Limits(keepalive_expiry=None),  # connections stay open
        trust_env=False,  # no proxy stands between a run and its servers
    )
