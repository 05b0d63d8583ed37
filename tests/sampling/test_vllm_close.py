"""The end of a vLLM client while requests are in flight."""

import threading
import time

import numpy as np
import pytest

from jaxrl.sampling.base import ClosedError, SamplingParams
from jaxrl.sampling.vllm.sampler import VllmSampler
from tests.sampling.standin import SECONDS


def test_closing_while_the_last_answer_is_read_ends_the_iteration(server, monkeypatch):
    sampler = VllmSampler([server.url], max_positions=64, vocab_size=64, max_requests=2)
    reading, release, found = threading.Event(), threading.Event(), []
    read = VllmSampler._read

    def slow(*args):
        reading.set()
        release.wait(SECONDS)
        return read(*args)

    def iterate():
        with pytest.raises(ClosedError):
            list(sampler.sample([np.array([2])] * 4, SamplingParams(max_tokens=3), group_size=1))
        found.append(True)

    monkeypatch.setattr(VllmSampler, "_read", slow)
    threads = [threading.Thread(target=run, daemon=True) for run in (iterate, sampler.close)]
    threads[0].start()
    reading.wait(SECONDS)
    threads[1].start()
    while not sampler._pools[-1]._shutdown:
        time.sleep(0.01)
    release.set()
    for thread in threads:
        thread.join(SECONDS)
    assert found == [True]
