"""Weight swap: brings a written version into service on every server."""

import abc
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxrl.bridge.base import (
    BehindError,
    InFlight,
    LearnerIdentity,
    PoisonedError,
    RefusedError,
    Timings,
    UnavailableError,
    WeightSource,
    check_head,
    new_learner,
)
from jaxrl.bridge.servers.control import VllmServer

_F32 = np.dtype(np.float32)  # as in every preset of `Precision`
_FAILURES = PoisonedError, RefusedError, UnavailableError  # the worst first
_ALL_BEHIND = 120.0  # seconds that a publish waits for the first host
_PAUSE = 1.0  # seconds between two questions to hosts that are behind


class WeightPublisher(contextlib.AbstractContextManager["WeightPublisher"]):
    """Publishes whole weights to every server; a subclass writes them where servers find them."""

    def __init__(
        self,
        servers: Sequence[VllmServer],
        root: str,
        *,
        wire: np.dtype,
        sampler: np.dtype,
        logits: np.dtype = _F32,
        blocks: str = "none",
        in_flight: InFlight = "keep",
        learner: LearnerIdentity | None = None,
    ) -> None:
        """Connects the servers.

        Args:
          servers: the servers to update.
          root: parent of the payloads, which the servers must see under the same path; "" for the
            directory of the agent on each server's host.
          wire: dtype of the published tensors.
          sampler: dtype that the servers compute in.
          logits: dtype that their heads compute in.
          blocks: form of their operands, as `Precision.blocks`.
          in_flight: treatment of requests in flight.
          learner: identity of the learner; by default a new one.

        Raises RefusedError as `VllmServer.connect`, and ValueError if the head's weights would be
        rounded.
        """
        check_head(sampler.name, logits.name)
        self._servers = servers
        self._learner = learner or new_learner()
        self._in_flight: InFlight = in_flight
        self._settings: dict[str, Any] = {
            "root": root,
            "wire": wire.name,
            "sampler": sampler.name,
            "logits": logits.name,
            "blocks": blocks,
            "learner": self._learner,
        }
        for server in servers:
            server.connect(**self._settings)

    def use(self, servers: Sequence[VllmServer]) -> None:
        """Publishes to these servers from now on. New ones are connected; one that refuses counts
        as failed, and others may continue without it."""
        for server in servers:
            if server not in self._servers:
                try:
                    server.connect(**self._settings)
                except RefusedError as error:
                    server.fail(error)
        self._servers = servers

    def publish(self, source: WeightSource, *, version: int) -> Timings:
        """Returns once every healthy server, and at least one, serves `version`. Servers keep
        sampling while it is written. Those that are behind are not waited for.

        Raises:
          RefusedError: every server refused and serves its old version.
          PoisonedError: no server serves `version`, and one stays paused; publish again.
          UnavailableError: no server answers.
        """
        start = time.perf_counter()
        payload = self._write(source, version=version)
        written = time.perf_counter() - start

        def update(server: VllmServer) -> Timings:
            start = time.perf_counter()
            name = self._bring(server, payload)
            fetched = time.perf_counter() - start
            timings = server.update(name, version=version, in_flight=self._in_flight)
            return timings._replace(fetch=fetched)

        return self._swap(update)._replace(write=written)

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Frees the publisher's memory or storage; servers keep the weights they have loaded."""

    @abc.abstractmethod
    def _write(self, source: WeightSource, *, version: int) -> Any:
        """Writes a payload; returns its directory's name below the root, or an argument of
        `_bring`."""

    def _swap(self, update: Callable[[VllmServer], Timings]) -> Timings:
        return swap_weights(self._servers, update)

    def _bring(self, server: VllmServer, payload: Any) -> str:
        """Brings a written payload to a server that still samples; returns its directory's name
        below the server's root."""
        return payload


def swap_weights(servers: Sequence[VllmServer], update: Callable[[VllmServer], Timings]) -> Timings:
    """Updates all servers at once and returns the slowest one's timings, with `write` 0.

    Failed servers are skipped if at least one has taken the version: ending the run for one failed
    server would leave some with the new weights and some with the old. They count as not connected,
    wherever they failed: in the store, at their host's agent, or in the engine. Servers whose hosts
    are behind are waited for, for two minutes, only if no other has taken it. Otherwise it raises
    the worst error of `update`: PoisonedError, then RefusedError, then UnavailableError.
    """

    def attempt(server: VllmServer) -> Timings | Exception:
        try:
            return update(server)
        except _FAILURES as error:
            server.fail(error)
            return error

    end = time.monotonic() + _ALL_BEHIND
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        results = dict(zip(servers, pool.map(attempt, servers), strict=True))
        while not _timings(results.values()) and time.monotonic() < end:
            behind = [server for server, r in results.items() if isinstance(r, BehindError)]
            if not behind:
                break
            time.sleep(_PAUSE)
            results |= zip(behind, pool.map(attempt, behind), strict=True)
    if timings := _timings(results.values()):
        return Timings(*(max(part) for part in zip(Timings(), *timings, strict=True)))
    failures = [r for kind in _FAILURES for r in results.values() if isinstance(r, kind)]
    if not failures:
        return Timings()
    behind = any(isinstance(failure, BehindError) for failure in failures)
    if behind and isinstance(failures[0], UnavailableError):
        raise UnavailableError(_named(results))
    raise failures[0]


def _timings(results: Iterable[Timings | Exception]) -> list[Timings]:
    return [result for result in results if isinstance(result, Timings)]


def _named(results: Mapping[VllmServer, Timings | Exception]) -> str:
    return "no server can be given the version: " + "; ".join(
        f"{server.url}: {result}" for server, result in results.items()
    )
