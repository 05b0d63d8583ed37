"""Bringing a written payload into service on every server."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from jaxrl.bridge.base import InFlight, LostError, PoisonedError, RefusedError, Server, Timings


def switch(
    servers: Sequence[Server], payload: str, *, version: int, in_flight: InFlight
) -> Timings:
    """Updates all servers at once and returns the slowest one's timings, with `write` 0.

    Servers that do not answer are passed over as long as one does.

    Raises:
      PoisonedError: if any server's load failed halfway.
      RefusedError: if any server refused and none is poisoned.
      LostError: if no server answers.
    """

    def update(server: Server) -> Timings | Exception:
        try:
            return server.update(payload, version=version, in_flight=in_flight)
        except (RefusedError, PoisonedError, LostError) as error:
            return error

    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        results = list(pool.map(update, servers))
    timings = [r for r in results if isinstance(r, Timings)]
    for kind in (
        (PoisonedError, RefusedError) if timings else (PoisonedError, RefusedError, LostError)
    ):
        for result in results:
            if isinstance(result, kind):
                raise result
    return Timings(*(max(part) for part in zip(Timings(), *timings, strict=True)))
