"""Hosts of servers on slow links: seconds until all have a version from a store."""

import json
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path, PurePath
from typing import Any

import jax
import numpy as np
from benchmarks.link import Link
from benchmarks.publishing import MODELS
from benchmarks.web_store import web_store

from jaxrl.bridge import AgentProcess, ParamsSource, Store, StorePublisher, TensorSpec, Timings
from jaxrl.bridge.in_vllm.relay import SOCKET
from jaxrl.core import DType
from jaxrl.models import decoder, init

_KEY = "a key"
_CHANGED = (0.2, 0.006)  # shares of the words that change before a version


class _Host:
    """A stand-in for a server behind its own link; loads nothing."""

    url, connected = "", True

    def __init__(self, agent: AgentProcess, link: Link) -> None:
        self._agent, self._link, self._learner = agent, link, {}

    def connect(self, *, learner: Any, **_: Any) -> None:
        self._learner = learner._asdict()

    def fetch(self, request: dict[str, Any]) -> PurePath | None:
        path = request["store"].split("/", 3)[3]
        store = f"http://127.0.0.1:{self._link.port}/{path}"
        request = {**request, "store": store, "learner": self._learner, "server": "1"}
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self._agent.directory / SOCKET))
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(connection.makefile().readline())
        found = answer["body"]["directory"]
        return None if found is None else PurePath(found)

    def update(self, *_: Any, **__: Any) -> Timings:
        return Timings()


class _Weights:
    """A `WeightSource` that flips the lowest bit of a share of its words."""

    def __init__(self, name: str, dtype: DType) -> None:
        config = MODELS[name]
        specs = decoder(config).specs
        source = ParamsSource(init(specs, jax.random.key(0), dtype=dtype), specs, dtype=dtype)
        self._specs = source.specs()
        self._tensors = {name: np.array(array) for name, array in source}
        self.nbytes = sum(array.nbytes for array in self._tensors.values())

    def change(self, share: float, *, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for array in self._tensors.values():
            words = array.reshape(-1).view(f"u{array.itemsize}")
            words ^= rng.random(words.size, np.float32) < share

    def specs(self) -> list[TensorSpec]:
        return self._specs

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from self._tensors.items()


def measure(name: str, *, wire: DType, hosts: int, bandwidth: float) -> Iterator[dict[str, float]]:
    """Publishes the whole weights, then versions with shares of the words changed.

    Learner and hosts each have a link of `bandwidth` bytes a second to one nginx.

    Yields:
      the share, seconds (`write` by the learner, `fetch` by the slowest host, and both), and MB
      that the learner and each host moved.
    """
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        directory.chmod(0o755)
        port = stack.enter_context(web_store(directory / "store", key=_KEY))
        links = [stack.enter_context(Link(port, bandwidth=bandwidth)) for _ in range(hosts + 1)]
        servers: Any = [
            _Host(stack.enter_context(AgentProcess(key=_KEY, note=print)), link)
            for link in links[1:]
        ]
        time.sleep(2)  # the agents start
        url = f"http://127.0.0.1:{links[0].port}"
        weights = _Weights(name, wire)
        publisher = stack.enter_context(
            StorePublisher(servers, Store(url, _KEY), wire=wire, sampler=wire)
        )
        for version, share in enumerate([1.0, *_CHANGED]):
            if version:
                weights.change(share, seed=version)
            before = [list(link.sent) for link in links]
            timings = publisher.publish(weights, version=version)
            moved = [
                np.subtract(link.sent, old) / 1e6 for link, old in zip(links, before, strict=True)
            ]
            yield {
                "whole" if not version else "changed": share,
                "MB": weights.nbytes / 1e6,
                "write": timings.write,
                "fetch": timings.fetch,
                "to the last host": timings.write + timings.fetch,
                "MB up": float(moved[0][1]),
                "MB down": float(max(m[0] for m in moved[1:])),
            }
