"""A learner that stops inside of a publish, to be killed there.

    python -m tests.bridge.killed_learner URL NAME TENSORS PLACE

It publishes version 7 of the weights in TENSORS and stops before it sends the request PLACE, with
"during PLACE" once it has sent it, or with "write" when half of the payload is written. Then it
prints the directory of its payloads. It imports no jax, so that it starts at once.
"""

import http.client
import json
import os
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.bridge.base import TensorSpec, new_learner
from jaxrl.bridge.in_vllm.auth import KEY
from jaxrl.bridge.servers.control import VllmServer
from jaxrl.bridge.shared_memory import SharedMemoryPublisher

PLACES = (
    "write",
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "during /update_weights",
    "/finish_weight_update",
    "during /finish_weight_update",
    "/resume",
)


def kill_in_publish(url: str, *, key: str, name: str, tensors: Path, place: str) -> Path:
    """Kills a learner (-9) at a place of its publish; returns the directory of its payloads."""
    command = [sys.executable, "-m", __name__, url, name, str(tensors), place]
    environment = os.environ | {KEY: key}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=environment, cwd=Path(__file__).parents[2]
    ) as learner:
        try:
            assert learner.stdout is not None
            root = Path(learner.stdout.readline().decode().strip())
            assert root.is_dir(), f"the learner ended with status {learner.wait()}"
        finally:
            learner.kill()
        assert learner.wait() == -signal.SIGKILL
    return root


class Source:
    """A `WeightSource` that calls a function at its middle."""

    def __init__(self, path: str, *, at_half: Any) -> None:
        with np.load(path) as file:
            self._tensors, self._at_half = dict(file), at_half

    def specs(self) -> list[TensorSpec]:
        """Describes the tensors."""
        return [TensorSpec(name, x.shape, x.dtype.name) for name, x in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for number, item in enumerate(self._tensors.items()):
            if number == len(self._tensors) // 2:
                self._at_half()
            yield item


def main() -> None:
    """Publishes and stops."""
    url, name, tensors, place = sys.argv[1:]
    server = VllmServer(url, api_key=os.environ[KEY])
    call = server._call

    def stop() -> None:
        print(publisher._root, flush=True)
        signal.pause()

    def stopping(method: str, path: str, body: Any = None, **options: Any) -> Any:
        step = path.partition("?")[0]
        if step == place:
            stop()
        if f"during {step}" == place:
            address = urllib.parse.urlsplit(url).netloc
            headers = {**server._client.headers, "Content-Type": "application/json"}
            sent = http.client.HTTPConnection(address)
            sent.request(method, path, json.dumps(body), headers)  # reads no response
            stop()
        return call(method, path, body, **options)

    server._call = stopping
    f32 = np.dtype(np.float32)
    with SharedMemoryPublisher(
        [server], wire=f32, sampler=f32, learner=new_learner(name)
    ) as publisher:
        source = Source(tensors, at_half=stop if place == "write" else lambda: None)
        publisher.publish(source, version=7)


if __name__ == "__main__":
    main()
