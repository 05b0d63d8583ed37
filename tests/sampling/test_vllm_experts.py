"""Routing replay with servers, against a stand-in that speaks vLLM's format of routed experts."""

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxrl.sampling.base import SamplingParams
from jaxrl.sampling.vllm.router import SamplerError
from jaxrl.sampling.vllm.sampler import VllmSampler
from tests.sampling.standin import Server, choice

PROMPT = np.array([2, 3], np.int32)
PARAMS = SamplingParams(max_tokens=6, stop=((1,), (5, 6)))


def routed(tokens: int, *, offset: int = 0) -> str:
    """What vLLM sends: entry t of layer 1 has experts t + offset and 0; layer 0 is dense."""
    rows = np.zeros((tokens - 1, 3, 2), np.uint8)
    rows[:, 1, 0] = np.arange(tokens - 1) + offset
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture
def sampler(server: Server) -> Iterator[VllmSampler]:
    made = VllmSampler(
        [server.url], max_positions=64, vocab_size=64, timeout=100.0, routed_layers=2
    )
    yield made
    made.close()


def answering(*choices: dict[str, Any]):
    queue = iter(choices)
    return lambda body: (200, json.dumps({"choices": [next(queue)]}))


def test_experts_cover_all_but_last_token(server, sampler):
    server.reply = answering(choice(0, [9] * 6, routed_experts=routed(8)))
    (found,) = sampler.sample([PROMPT], PARAMS, group_size=1)
    assert found.experts[:, 0, 0].tolist() == list(range(7))
    # A stop sequence of several tokens ends the completion here, not at the server.
    server.reply = answering(choice(0, [9, 5, 6, 9, 9, 9], routed_experts=routed(8)))
    (found,) = sampler.sample([PROMPT], PARAMS, group_size=1)
    assert found.tokens.tolist() == [9, 5, 6]
    assert found.experts[:, 0, 0].tolist() == [0, 1, 2, 3]


def test_continued_completion_keeps_its_experts(server, sampler):
    """The server computes the beginning again, with newer weights and other experts."""
    begun = choice(0, [9, 9, 9], finish_reason="abort", routed_experts=routed(5))
    span = [{"version": "5", "start": 0, "end": 3}]
    ended = choice(0, [8] * 3, weight_versions=span, routed_experts=routed(8, offset=100))
    server.reply = answering(begun, ended)
    (found,) = sampler.sample([PROMPT], PARAMS, group_size=1)
    assert found.versions.tolist() == [4] * 3 + [5] * 3
    assert found.experts[:, 0, 0].tolist() == [0, 1, 2, 3, 104, 105, 106]


def test_server_without_experts_is_an_error(server, sampler):
    server.reply = answering(choice(0, [9] * 6, routed_experts=None))
    with pytest.raises(SamplerError, match=r"reports no experts.*--enable-return-routed-experts"):
        list(sampler.sample([PROMPT], PARAMS, group_size=1))
    server.reply = answering(choice(0, [9] * 6, routed_experts=routed(7)))
    with pytest.raises(SamplerError, match=r"shape \[6, 3, 2\] for 8 tokens; expected \[7, layers"):
        list(sampler.sample([PROMPT], PARAMS, group_size=1))
