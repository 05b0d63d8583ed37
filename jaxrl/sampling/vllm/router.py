"""Load balancing over vLLM servers, with prefix affinity, retries and failover.

Requests queue in the client, not in a server: each server gets at most `max_requests` concurrent
requests, over connections that stay open. The next request goes to the least-loaded server, so a
slow server gets fewer. A request that continues a prefix goes to the server that has the prefix in
its cache, unless that server has many more requests than the others.
"""

import contextlib
import functools
import itertools
import json
import socket
import threading
import time
import urllib.parse
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import httpx2

from jaxrl.sampling.base import ClosedError

GENERATE = "/inference/v1/generate"
"""The only route that reports which weights sampled each token."""
_ATTEMPTS, _FIRST_WAIT = 4, 0.5  # three retries, after 0.5, 1 and 2 seconds
_REMEMBERED = 100_000  # prefixes, some 20 MB; weights that never change would add them for good
# In vLLM 0.33's status 503 during a weight sync that drains or aborts requests; 0.32 queues them.
_PAUSED, _PAUSE_WAIT = "Generation is paused", 0.05

T = TypeVar("T")


class SamplerError(RuntimeError):
    """A server did not answer or its response is invalid; the message quotes the server.

    Attributes:
      status: of a response that refuses the request; 0 otherwise.
    """

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class UnpublishedWeightsError(SamplerError):
    """The server holds weights that no learner has published, for instance after a restart."""


class Router:
    """A load balancer for servers that serve the same weights.

    A failed server gets no more requests until `use` names it again; its requests are retried on
    the others. When all servers have failed, all that `use` named last are tried again, and
    requests fail after a few attempts. No other server is used: it may hold weights of steps that
    were rolled back.
    """

    def __init__(
        self, urls: Sequence[str], *, max_requests: int, timeout: float, headers: Mapping[str, str]
    ) -> None:
        """Makes the router without connecting; arguments and errors as in `VllmScorer`."""
        if not urls:
            raise ValueError("urls is empty; give the address of at least one server")
        self._open = functools.partial(_client, timeout=timeout, headers=headers)
        self._clients = {url: self._open(url) for url in urls}
        self._current = self._healthy = set(urls)
        self._max_requests = max_requests
        self._timeout = timeout
        self._loads: Counter[str] = Counter()
        self._sockets = defaultdict[str, weakref.WeakSet[socket.socket]](weakref.WeakSet)
        self._affinity: dict[Hashable, str] = {}
        self._numbers = itertools.count()
        self._last_used: dict[str, int] = {url: next(self._numbers) for url in urls}
        self._changed = threading.Condition()  # guards all of these
        self._closed = threading.Event()

    def post(
        self,
        body: Mapping[str, Any],
        *,
        read: Callable[[str], T],
        about: str,
        keys: Sequence[Hashable] = (),
        path: str = GENERATE,
    ) -> T:
        """Posts a request for tokens and returns `read` of the response's text; queues and retries.

        `read` raises UnpublishedWeightsError if the server must not be used. `about` is the subject
        of error messages. The server of the last request with the first affinity key is preferred;
        later requests with any of the keys prefer this request's server.

        Raises:
          SamplerError: if a server refuses the request, or no server answers it.
          ClosedError: if the router is closed.
        """
        content, failures, failed = json.dumps(body), 0, None
        patience = time.monotonic() + self._timeout
        while True:
            with self._server(keys, failed) as url:
                status, text = self._exchange(url, path, content)
                if status == 200:
                    try:
                        return read(text)
                    except UnpublishedWeightsError:
                        if self._fail_over(url):
                            continue
                        raise
                # A restarted server does not know the route or the adapter (404). A server whose
                # engine has died answers 500, and faster than the others, until it exits.
                if status in (0, 404, 500) and self._fail_over(url):
                    continue
            if status == 503 and _PAUSED in text and time.monotonic() < patience:
                self._closed.wait(_PAUSE_WAIT)
                continue
            failures, failed = failures + 1, url
            final = 400 <= status < 500 or failures == _ATTEMPTS
            if self._closed.wait(0 if final else _FIRST_WAIT * 2 ** (failures - 1)):
                raise ClosedError("the sampler was closed")
            if final:
                raise SamplerError(
                    f"{url} did not answer {about}: {status or ''} {text}", status=status
                )

    def use(self, urls: Sequence[str], *, left: Collection[str] = ()) -> None:
        """Sends requests to these servers only, some of which may be new. Requests in flight at
        others are retried, because a paused server would hold them until the timeout; those at
        servers that have `left` are finished there. Prefix affinity is cleared: new weights
        invalidate the servers' caches. Raises ValueError for an address that is not http://."""
        new = {url: self._open(url) for url in urls if url not in self._clients}
        with self._changed:
            self._clients |= new
            self._last_used |= {url: next(self._numbers) for url in new}
            self._current = self._healthy = set(urls)
            self._affinity.clear()
            self._changed.notify_all()
            self._shut(self._clients.keys() - self._current - set(left))

    def limit(self, max_requests: int) -> None:
        """Sends at most so many requests to each server at the same time from now on."""
        with self._changed:
            self._max_requests = max_requests
            self._changed.notify_all()

    def abort(self) -> None:
        """Closes all connections, so that servers abort their requests and waiting calls fail."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
            self._shut(self._clients)

    def close(self) -> None:
        """Frees the connections; no request may be in flight."""
        for client in self._clients.values():
            client.close()

    def _exchange(self, url: str, path: str, content: str) -> tuple[int, str]:
        """Returns the status and text of a server's response; 0 and the error without one.

        A request whose connection breaks is sent once more: a healthy server may close an idle
        connection.
        """
        note = functools.partial(self._note, url)
        send = functools.partial(
            self._clients[url].post, path, content=content, extensions={"trace": note}
        )
        try:
            try:
                answer = send()
            except (httpx2.ReadError, httpx2.RemoteProtocolError):
                if url not in self._healthy or self._closed.is_set():
                    raise
                answer = send()
        except httpx2.RequestError as error:
            return 0, repr(error)
        return answer.status_code, answer.text

    def _note(self, url: str, event: str, details: Mapping[str, Any]) -> None:
        """Records the sockets that a client opens: closing a client wakes no waiting thread."""
        if event == "connection.connect_tcp.complete":
            with self._changed:
                self._sockets[url].add(details["return_value"].get_extra_info("socket"))
                if url not in self._current or self._closed.is_set():
                    self._shut([url])

    def _shut(self, urls: Iterable[str]) -> None:
        """Shuts down the connections to servers; threads that wait on them get an error."""
        for connection in itertools.chain.from_iterable(self._sockets[url] for url in urls):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _server(self, keys: Sequence[Hashable], failed: str | None) -> Iterator[str]:
        """Waits for a server with a free request slot and takes the slot for the block."""
        with self._changed:
            while not (free := [u for u in self._healthy if self._loads[u] < self._max_requests]):
                if self._closed.is_set():
                    break
                self._changed.wait()
            if self._closed.is_set():
                raise ClosedError("the sampler was closed")
            # The server that has just failed gets the retry only if no other is free.
            chosen = self._select([url for url in free if url != failed] or free, keys)
            self._last_used[chosen] = next(self._numbers)
            if len(self._affinity) > _REMEMBERED:
                self._affinity.clear()
            self._affinity |= dict.fromkeys(keys, chosen)
            self._loads[chosen] += 1
        try:
            yield chosen
        finally:
            with self._changed:
                self._loads[chosen] -= 1
                self._changed.notify()

    def _select(self, free: Sequence[str], keys: Sequence[Hashable]) -> str:
        """Returns the server with the request's prefix, or the least-loaded one, in rotation."""
        preferred = self._affinity.get(keys[0]) if keys else None
        limit = min(self._loads[url] for url in free) + max(1, self._max_requests // 8)
        if preferred is not None and preferred in free and self._loads[preferred] <= limit:
            return preferred
        return min(free, key=lambda url: (self._loads[url], self._last_used[url]))

    def _fail_over(self, url: str) -> bool:
        """Marks a server as failed; returns True if another is left. Otherwise all count as healthy
        again."""
        with self._changed:
            others = self._healthy - {url}
            left = bool(others) and not self._closed.is_set()
            self._healthy = others if left else self._current
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
        trust_env=False,  # no proxy between a run and its servers
    )
