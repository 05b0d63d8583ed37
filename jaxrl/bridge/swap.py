"""Weight swap: brings a written version into service on every server."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from jaxrl.bridge.base import PoisonedError, RefusedError, Timings, UnavailableError

_FAILURES = PoisonedError, RefusedError, UnavailableError  # the worst first

S = TypeVar("S")


def swap_weights(servers: Sequence[S], update: Callable[[S], Timings]) -> Timings:
    """Updates all servers at once and returns the slowest one's timings, with `write` 0.

    Failed servers are skipped if at least one has taken the version: ending the run for one failed
    server would leave some with the new weights and some with the old.

    Args:
      servers: the servers.
      update: updates one server; raises as `Server.update`.

    Raises:
      PoisonedError: if no server has taken the version and a load failed halfway.
      RefusedError: if none has, none is poisoned and one refused.
      UnavailableError: if no server is available.
    """

    def attempt(server: S) -> Timings | Exception:
        try:
            return update(server)
        except _FAILURES as error:
            return error

    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        results = list(pool.map(attempt, servers))
    timings = [r for r in results if isinstance(r, Timings)]
    failures = [r for kind in _FAILURES for r in results if isinstance(r, kind)]
    if failures and not timings:
        raise failures[0]
    return Timings(*(max(part) for part in zip(Timings(), *timings, strict=True)))
