"""A stand-in for a vLLM server, for one test."""

import threading
from collections.abc import Iterator

import pytest

from tests.sampling.standin import Server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("jaxrl.sampling.vllm.router._FIRST_WAIT", 0.05)
    with Server() as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield made
        made.shutdown()
