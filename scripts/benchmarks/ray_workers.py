"""Workers of a fleet in processes of a real Ray that play simulated groups."""

import os
import sys
from concurrent.futures import Future
from typing import Any

from benchmarks.simulated_workers import Actor, Method

from jaxrl.fleet.engine import connect, import_ray
from jaxrl.fleet.worker import Worker

_INLINE = 100 << 10  # bytes above which Ray passes a result through its object store


class RayField:
    """Workers on this machine, and the bytes that they are sent and send."""

    def __init__(self) -> None:
        connect(namespace="bench")
        self.received = self.sent = self.stored = 0
        self._made: list[Any] = []

    def actor(self) -> Actor:
        """Starts a worker; returns an actor with the methods that `Workers` calls."""
        kind = import_ray().remote(Worker).options(num_cpus=0)
        made = kind.remote(os.getcwd(), list(filter(None, sys.path)), processors=1)
        self._made.append(made)
        return Actor(
            call=Method(lambda request: self._call(made, request)),
            awake=Method(lambda: made.awake.remote().future()),
        )

    def close(self) -> None:
        """Ends Ray with the workers."""
        import_ray().shutdown()

    def _call(self, made: Any, request: bytes) -> "Future[bytes]":
        self.received += len(request)
        answer = made.call.remote(request).future()
        answer.add_done_callback(self._count)
        return answer

    def _count(self, answer: "Future[bytes]") -> None:
        size = len(answer.result())
        self.sent += size
        self.stored += size if size > _INLINE else 0
