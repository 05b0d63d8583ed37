"""The stand-in for a vLLM server, and a Ray that waits for its own processes."""

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.sampling.conftest import server as server


@pytest.fixture(scope="module")
def patient_ray() -> Iterator[None]:
    """Gives a node of Ray 300 s to start, and none once its raylet has ended. Ray has a limit of
    30 s, which a busy machine exceeds."""
    ended = set[int]()

    def monotonic() -> float:
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if (child.name(), child.status()) == ("raylet", psutil.STATUS_ZOMBIE):
                    ended.add(child.pid)
        return time.monotonic() / 10 + 1000 * len(ended)

    slow = SimpleNamespace(**vars(time) | {"monotonic": monotonic})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray._private.node.time", slow)
        yield


def started(start: Callable[[], Any]) -> Any:
    """Starts nodes of Ray, again if a raylet has ended: it does so if its agents need 15 s."""
    for _ in range(9):
        others = {*psutil.Process().children(recursive=True)}
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            for process in {*psutil.Process().children(recursive=True)} - others:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    return start()
