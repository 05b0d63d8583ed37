"""A server that another learner has taken over, and one that is paused."""

import itertools
import json
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl.sampling.base import Completion, SamplingParams
from jaxrl.sampling.vllm.router import SamplerError
from jaxrl.sampling.vllm.sampler import VllmSampler
from tests.sampling.standin import Server, choice, respond


@pytest.fixture
def sampler(server: Server) -> Iterator[VllmSampler]:
    made = VllmSampler([server.url], max_positions=64, vocab_size=64)
    yield made
    made.close()


def ask(sampler: VllmSampler, prompt: list[int]) -> list[Completion]:
    params = SamplingParams(max_tokens=8)
    return list(sampler.sample([np.array(prompt, np.int32)], params, group_size=1))


def test_weights_of_another_learner_are_an_error(server, sampler):
    """It took the server over between two publishes, and its version has the same number."""

    def reply(session):
        span = [{"version": f"4@{session}", "start": 0, "end": 1}]
        made = json.dumps({"choices": [choice(0, [7], weight_versions=span)]})
        return lambda body: (200, made)

    sampler.use_version(4, urls=[server.url], session="ours")
    server.reply = reply("ours")
    (one,) = ask(sampler, [2])
    assert one.versions.tolist() == [4]
    server.reply = reply("theirs")
    with pytest.raises(SamplerError, match=r"'4@theirs' of another learner.*@ours"):
        ask(sampler, [2])


def test_requests_wait_while_the_server_is_paused(server, sampler):
    """vLLM 0.33 refuses them during a weight sync that drains or aborts the requests in flight."""
    paused = {"error": {"message": "Generation is paused. Please retry after it resumes."}}

    def reply(body):
        return (503, json.dumps(paused)) if len(server.bodies) < 10 else respond(body)

    server.reply = reply
    assert len(ask(sampler, [2, 3])) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrl.sampling.vllm.router._ATTEMPTS", 1)
        late = SimpleNamespace(monotonic=itertools.count(step=60).__next__)
        patch.setattr("jaxrl.sampling.vllm.router.time", late)
        impatient = VllmSampler([server.url], max_positions=64, vocab_size=64, timeout=100.0)
        server.reply = lambda body: (503, json.dumps(paused))
        with pytest.raises(SamplerError, match="Generation is paused"):
            ask(impatient, [2])
        impatient.close()
