"""Bringing a written payload into service on every server."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from jaxrl.bridge.base import InFlight, LostError, PoisonedError, RefusedError, Server, Timings


def switch(
    servers: Sequence[Server], payload: str, *, version: int, in_flight: InFlight
) -> Timings:
    """Updates all servers at once and returns the slowest one's timings, with `write` 0.

    Servers that fail are passed over as long as one has taken the version: to end the run because
    one of several is ill would leave some with the new weights and some with the old ones.

    Raises:
      PoisonedError: if no server has taken it and a load failed halfway.
      RefusedError: if none has, none is poisoned and one refused.
      LostError: if no server does what it is told.
    """

    def update(server: Server) -> Timings | Exception:
        try:
            return server.update(payload, version=version, in_flight=in_flight)
        except (RefusedError, PoisonedError, LostError) as error:
            return error

    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        results = list(pool.map(update, servers))
    timings = [r for r in results if isinstance(r, Timings)]
    if not timings:
        for kind in (PoisonedError, RefusedError, LostError):
            for result in results:
                if isinstance(result, kind):
                    raise result
    return Timings(*(max(part) for part in zip(Timings(), *timings, strict=True)))
