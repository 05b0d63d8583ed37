"""A stand-in for a vLLM server, and a run that is sampled ahead, for one test."""

import threading
from collections.abc import Iterator

import pytest

from jaxrl.training.rollouts.stream import Stream
from tests.sampling.standin import Server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("jaxrl.sampling.vllm.router._FIRST_WAIT", 0.05)
    with Server() as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield made
        made.shutdown()


@pytest.fixture
def sampled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a run's first step wait for a group of the next one, whose weights are then older."""
    collect = Stream.collect

    def late(stream: Stream, *, seconds: dict[str, float]) -> object:
        batch = collect(stream, seconds=seconds)
        with stream._changed:
            stream._changed.wait_for(
                lambda: stream._step or stream._buffer.waiting or stream._error
            )
        return batch

    monkeypatch.setattr(Stream, "collect", late)
