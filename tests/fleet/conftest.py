"""The stand-in for a vLLM server, and a Ray that waits for its own processes."""

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.sampling.conftest import server as server


@pytest.fixture(scope="module")
def patient_ray() -> Iterator[None]:
    """Gives a node of Ray 300 s to start. Ray has a limit of 30 s, which a busy machine exceeds."""
    slow = SimpleNamespace(**vars(time) | {"monotonic": lambda: time.monotonic() / 10})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray._private.node.time", slow)
        yield
