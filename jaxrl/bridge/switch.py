"""Bringing a written payload into service on every server."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from jaxrl.bridge.base import InFlight, PoisonedError, RefusedError, Server, Timings


def switch(
    servers: Sequence[Server], payload: str, *, version: int, in_flight: InFlight
) -> Timings:
    """Updates all servers at once and returns the slowest one's timings, with `write` 0.

    Raises:
      PoisonedError: if any server's load failed halfway.
      RefusedError: if any server refused and none is poisoned.
    """

    def update(server: Server) -> Timings | Exception:
        try:
            return server.update(payload, version=version, in_flight=in_flight)
        except (RefusedError, PoisonedError) as error:
            return error

    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        results = list(pool.map(update, servers))
    failures = [r for r in results if isinstance(r, Exception)]
    if failures:
        raise next((f for f in failures if isinstance(f, PoisonedError)), failures[0])
    timings = [r for r in results if isinstance(r, Timings)]
    return Timings(*(max(part) for part in zip(Timings(), *timings, strict=True)))
