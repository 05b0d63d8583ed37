"""Truncated sampling with servers: a stand-in speaks vLLM's format of sampling masks."""

import json
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.core.kept import decode
from jaxrl.sampling.base import SamplingParams
from jaxrl.sampling.vllm.router import SamplerError
from jaxrl.sampling.vllm.sampler import VllmSampler
from tests.sampling.standin import Server, choice

PROMPT = np.array([2, 3], np.int32)
VOCAB = 152_000  # of 18 bits, so that a record names 14
PARAMS = SamplingParams(max_tokens=6, stop=((1,), (5, 6)), top_p=0.9, top_k=14)


@pytest.fixture
def sampler(server: Server) -> Iterator[VllmSampler]:
    made = VllmSampler(
        [server.url], max_positions=64, vocab_size=VOCAB, timeout=100.0, record_kept=True
    )
    yield made
    made.close()


def answering(*choices: dict[str, Any]):
    queue = iter(choices)
    return lambda body: (200, json.dumps({"choices": [next(queue)]}))


def sets(records: np.ndarray) -> list[list[int]]:
    return [sorted(set(row.tolist())) for row in decode(jnp.asarray(records), VOCAB)]


def test_records_name_the_servers_sets(server, sampler):
    masks = [[9], [5, 151_999, 7], [6, 0], [9, 8], [9], [9]]
    server.reply = answering(choice(0, [9, 5, 6, 9, 9, 9], sampling_mask=masks))
    (found,) = sampler.sample([PROMPT], PARAMS, group_size=1)
    # The stop sequence of several tokens ends the completion here, not at the server.
    assert found.tokens.tolist() == [9, 5, 6]
    assert sets(found.kept) == [[9], [5, 7, 151_999], [0, 6]]
    assert server.bodies[-1]["sampling_params"]["top_k"] == 14


def test_continued_completion_keeps_its_records(server, sampler):
    begun = choice(0, [9] * 3, finish_reason="abort", sampling_mask=[[9, 1], [9, 2], [9, 3]])
    ended = choice(0, [8] * 3, sampling_mask=[[8, 1], [8, 2], [8, 3]])
    server.reply = answering(begun, ended)
    (found,) = sampler.sample([PROMPT], PARAMS, group_size=1)
    assert sets(found.kept) == [[1, 9], [2, 9], [3, 9], [1, 8], [2, 8], [3, 8]]
    assert not np.isnan(found.logprobs).any()


def test_too_many_tied_tokens_leave_a_token_without_gradient(server, sampler):
    masks = [[9, 8], list(range(9, 24)), [9]]
    server.reply = answering(choice(0, [9] * 3, sampling_mask=masks))
    (found,) = sampler.sample([PROMPT], PARAMS, group_size=1)
    assert np.isnan(found.logprobs).tolist() == [False, True, False]
    assert sets(found.kept) == [[8, 9], [9], [9]]


def test_greedy_requests_are_ones_that_such_a_server_takes(server, sampler):
    greedy = SamplingParams(max_tokens=2, temperature=0)
    server.reply = answering(choice(0, [9] * 2, sampling_mask=[[9], [9]]))
    (found,) = sampler.sample([PROMPT], greedy, group_size=1)
    asked = server.bodies[-1]["sampling_params"]
    assert (asked["temperature"], asked["top_k"]) == (1.0, 1)
    assert found.kept is None
    assert np.isnan(found.logprobs).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"does not report the tokens .*--return-sampling-mask"),
        ({"sampling_mask": [[9]]}, "1 sets of kept tokens for 2 tokens"),
        ({"sampling_mask": [[9], [8]]}, "with the token in it"),
    ],
)
def test_missing_records_are_an_error(server, sampler, changes, message):
    server.reply = answering(choice(0, [9] * 2, **changes))
    with pytest.raises(SamplerError, match=message):
        list(sampler.sample([PROMPT], PARAMS, group_size=1))


def test_sets_without_a_bound_are_refused(sampler):
    with pytest.raises(ValueError, match=r"top_k=0: .* at most 14 of 152000"):
        sampler.sample([PROMPT], SamplingParams(max_tokens=2, top_p=0.9), group_size=1)
