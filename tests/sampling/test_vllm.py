"""The vLLM client against a stand-in server: retries, faults, aborts and stop sequences."""

import dataclasses
import json
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from jaxrl.huggingface.checkpoint import Checkpoint
from jaxrl.sampling.base import ClosedError, Completion, SamplingParams, Turn
from jaxrl.sampling.stop_texts import StopTexts
from jaxrl.sampling.vllm.sampler import SamplerError, VllmSampler
from tests import tiny
from tests.sampling.standin import SECONDS, Reply, Server, choice, respond, together

PARAMS = SamplingParams(max_tokens=8, seed=3, stop=((1,), (5, 6)))


def failing(*statuses: int) -> Reply:
    fates = iter(statuses)

    def reply(body: dict[str, Any]) -> tuple[int, str]:
        status = next(fates, 200)
        return respond(body) if status == 200 else (status, "try again")

    return reply


@pytest.fixture
def sampler(server: Server) -> Iterator[VllmSampler]:
    made = VllmSampler(
        [server.url],
        max_positions=64,
        vocab_size=64,
        max_requests=2,
        timeout=SECONDS,
        headers={"Authorization": "a key"},
    )
    yield made
    made.close()


def ask(sampler: VllmSampler, *prompts: list[int], group_size: int = 1) -> list[Completion]:
    arrays = [np.array(prompt, np.int32) for prompt in prompts]
    return list(sampler.sample(arrays, PARAMS, group_size=group_size))


def test_group_is_one_request(server, sampler):
    found = ask(sampler, [2, 3], [4], group_size=3)
    assert {(c.prompt_index, c.sample_index) for c in found} == {
        (i, j) for i in range(2) for j in range(3)
    }
    for c in found:
        assert c.tokens.tolist() == [7 + c.sample_index] * 8
        assert c.logprobs.dtype == np.float32
        assert c.versions.tolist() == [4] * 8
        assert c.finish_reason == "length"
    assert sorted(body["token_ids"] for body in server.bodies) == [[2, 3], [4]]
    settings = server.bodies[0]["sampling_params"]
    assert settings["stop_token_ids"] == [1]
    assert settings["ignore_eos"]
    assert settings["logprobs"] == 0
    assert server.keys == {"a key"}
    seeds = [body["sampling_params"]["seed"] for body in server.bodies]
    assert abs(seeds[0] - seeds[1]) > 1000  # within a group a server counts up from it


def test_greedy_group_is_a_request_each(server, sampler):
    """vLLM refuses several greedy completions in one request."""
    greedy = dataclasses.replace(PARAMS, temperature=0.0)
    found = list(sampler.sample([np.array([2, 3])], greedy, group_size=2))
    assert {c.sample_index for c in found} == {0, 1}
    assert [body["sampling_params"].get("n", 1) for body in server.bodies] == [1, 1]


def test_requests_are_limited_and_connections_reused(server, sampler):
    server.reply = together(2)
    assert len(ask(sampler, *[[2]] * 12)) == 12
    assert server.busiest == 2
    assert len(server.clients) == 2


def test_retry_sends_the_same_body(server, sampler):
    server.reply = failing(0, 503, 500)
    (one,) = ask(sampler, [2, 3])
    assert len(one.tokens) == 8
    assert len(server.bodies) == 4
    assert all(body == server.bodies[0] for body in server.bodies)


def test_refusal_is_final_and_quoted(server, sampler):
    server.reply = lambda body: (400, "max_model_len is 16")
    with pytest.raises(SamplerError, match=r"prompt 0: 400 max_model_len is 16"):
        ask(sampler, [2, 3])
    assert len(server.bodies) == 1


def test_completions_before_a_failure_stay_valid(server, sampler):
    first = threading.Event()

    def reply(body):
        if body["token_ids"] == [3]:
            assert first.wait(SECONDS)
            return 400, "no"
        return respond(body)

    server.reply = reply
    stream = sampler.sample([np.array([2]), np.array([3])], PARAMS, group_size=1)
    assert next(stream).prompt_index == 0
    first.set()
    with pytest.raises(SamplerError, match="prompt 1"):
        next(stream)


def test_an_unreachable_server_is_named_by_address(server):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrl.sampling.vllm.router._ATTEMPTS", 1)
        unreachable = VllmSampler(
            ["http://127.0.0.1:9"], max_positions=64, vocab_size=64, timeout=1.0
        )
        with pytest.raises(SamplerError, match=r"127\.0\.0\.1:9 .*refused"):
            ask(unreachable, [2])
    unreachable.close()
    with pytest.raises(ValueError, match="not the http"):
        VllmSampler(["localhost:8000"], max_positions=64, vocab_size=64)


def test_proxies_of_the_environment_are_ignored(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:9")
    direct = VllmSampler([server.url], max_positions=64, vocab_size=64)
    assert len(ask(direct, [2, 3])) == 1
    direct.close()


def test_aborted_completions_continue_where_they_stopped(server, sampler):
    def reply(body):
        if len(server.bodies) == 1:
            made = [
                choice(0, [9, 9, 9], finish_reason="abort"),
                choice(1, [8] * 8),
                choice(2, [], finish_reason="abort", weight_versions=[]),
            ]
            return 200, json.dumps({"choices": made})
        settings = body["sampling_params"]
        span = [{"version": "5", "start": 0, "end": settings["max_tokens"]}]
        return 200, json.dumps(
            {"choices": [choice(0, [10] * settings["max_tokens"], weight_versions=span)]}
        )

    server.reply = reply
    found = {c.sample_index: c for c in ask(sampler, [2, 3], group_size=3)}
    assert found[0].tokens.tolist() == [9] * 3 + [10] * 5
    assert found[0].versions.tolist() == [4] * 3 + [5] * 5
    assert found[1].tokens.tolist() == [8] * 8
    assert found[2].tokens.tolist() == [10] * 8
    assert sorted(body["token_ids"] for body in server.bodies[1:]) == [[2, 3], [2, 3, 9, 9, 9]]
    assert len({body["sampling_params"]["seed"] for body in server.bodies}) == 3


@pytest.fixture
def two(server: Server) -> Iterator[tuple[Server, Server, VllmSampler]]:
    with Server() as second:
        threading.Thread(target=second.serve_forever, daemon=True).start()
        both = VllmSampler(
            [server.url, second.url],
            max_positions=64,
            vocab_size=64,
            max_requests=2,
            timeout=SECONDS,
        )
        yield server, second, both
        both.close()
        second.shutdown()


def test_two_servers_share_the_requests(two):
    first, second, sampler = two
    first.reply = second.reply = together(4)
    found = ask(sampler, *[[i] for i in range(2, 22)], group_size=3)
    assert len({(c.prompt_index, c.sample_index) for c in found}) == len(found) == 60
    assert len(first.bodies) + len(second.bodies) == 20  # a group stays together
    assert len(first.bodies) == len(second.bodies)
    assert first.busiest == second.busiest == 2


def test_episode_stays_on_one_server(two):
    """Continuations after an abort stay too: the server has the prefix in its cache."""
    first, second, sampler = two
    prompts = {i: np.array([2, 3, i], np.int32) for i in range(10, 16)}
    for i, prompt in prompts.items():
        list(sampler.sample_turns([Turn(prompt, 0, j, 4) for j in range(2)], PARAMS))
        assert len(first.bodies) + len(second.bodies) == i - 9  # a group is one request
    begun = [{body["token_ids"][2] for body in server.bodies} for server in (first, second)]
    assert [len(prompts) for prompts in begun] == [3, 3]
    for server in (first, second):
        server.bodies.clear()
        server.reply = aborts_once(server)
    said = np.array([9, 9], np.int32)
    for i in (15, 10, 12, 14, 13, 11):
        for j in (1, 0):
            turn = Turn(np.concatenate([prompts[i], said]), 0, j, 4, prompt_length=3)
            (found,) = sampler.sample_turns([turn], PARAMS)
            assert len(found.tokens) == 4
    for server, expected in zip((first, second), begun, strict=True):
        assert {body["token_ids"][2] for body in server.bodies} == expected
        assert len(server.bodies) == 3 * 2 * 2


def aborts_once(server: Server) -> Reply:
    """Aborts every other request; the next one continues it."""

    def reply(body: dict[str, Any]) -> tuple[int, str]:
        if len(server.bodies) % 2 == 0:
            return respond(body)
        return 200, json.dumps({"choices": [choice(0, [9], finish_reason="abort")]})

    return reply


UNPUBLISHED = json.dumps(
    {"choices": [choice(0, [7], weight_versions=[{"version": "default", "start": 0, "end": 1}])]}
)


@pytest.mark.parametrize("fate", [(0, ""), (200, UNPUBLISHED)])
def test_failed_server_waits_for_next_publish(two, fate):
    first, second, sampler = two
    second.reply = lambda body: fate
    assert len(ask(sampler, *[[i] for i in range(2, 22)])) == 20
    refused = len(second.bodies)
    assert 1 <= refused <= 4  # at most one try per connection, and one retry
    assert len(ask(sampler, *[[i] for i in range(2, 22)])) == 20
    assert len(second.bodies) == refused
    second.reply = respond
    sampler.use_version(7, urls=[first.url, second.url])
    assert sampler.version == 7
    assert len(ask(sampler, *[[i] for i in range(2, 22)])) == 20
    assert len(second.bodies) > refused


def test_all_failed_servers_are_retried(two):
    first, second, sampler = two
    second.reply = lambda body: (0, "")
    first.reply = failing(0, 503)
    assert len(ask(sampler, [2], [3], [4])) == 3


def test_dropped_idle_connections_use_up_no_attempts(two, monkeypatch):
    """There may be more of them than a request has attempts while the other server is busy."""
    first, second, sampler = two
    monkeypatch.setattr("jaxrl.sampling.vllm.router._ATTEMPTS", 1)
    first.reply = second.reply = together(4)
    ask(sampler, *[[i] for i in range(2, 22)])
    assert (len(first.clients), len(second.clients)) == (2, 2)  # connections, which stay open
    first.reply = lambda body: (time.sleep(0.02), respond(body))[1]
    second.reply = lambda body: (0, "")
    assert len(ask(sampler, *[[i] for i in range(2, 22)])) == 20


def test_outdated_server_gets_no_requests(two):
    """It may hold weights of steps that were rolled back, under a version that comes again."""
    first, second, sampler = two
    sampler.use_version(7, urls=[first.url])
    first.reply = failing(0, 503)
    assert len(ask(sampler, *[[i] for i in range(2, 22)])) == 20
    assert second.bodies == []


def test_invalid_logprobs_are_nan(server, sampler):
    values = [-1.0, None, math.nan, 0.5, 1e-6, -math.inf]
    content = [{"logprob": v} for v in values]
    server.reply = lambda body: (
        200,
        json.dumps({"choices": [choice(0, [7] * 8, logprobs={"content": content})]}),
    )
    (one,) = ask(sampler, [2])
    expected = [-1.0, math.nan, math.nan, math.nan, 0.0, -math.inf, math.nan, math.nan]
    np.testing.assert_array_equal(one.logprobs, np.array(expected, np.float32))


def test_multi_token_stop_sequences_are_kept(server, sampler):
    server.reply = lambda body: (200, json.dumps({"choices": [choice(0, [5, 5, 6, 7, 5, 6])]}))
    (one,) = ask(sampler, [2])
    assert one.tokens.tolist() == [5, 5, 6]
    assert len(one.logprobs) == len(one.versions) == 3
    assert one.finish_reason == "stop"
    ended = choice(0, [7, 1], finish_reason="stop")
    server.reply = lambda body: (200, json.dumps({"choices": [ended]}))
    (one,) = ask(sampler, [2])
    assert (one.tokens.tolist(), one.finish_reason) == ([7, 1], "stop")


def test_servers_are_told_stop_texts(server, sampler, tmp_path):
    tokenizer = Checkpoint(tiny.write_checkpoint(tmp_path)).tokenizer
    texts = StopTexts(tokenizer, ["</a>", "="])
    said = [tokenizer.get_vocab()[c] for c in "1</a>2"]
    params = dataclasses.replace(PARAMS, stop_texts=texts)
    aborted = choice(0, said[:3], finish_reason="abort")
    answers = [[aborted], [choice(0, said[3:])], [choice(0, said, finish_reason="abort")]]
    server.reply = lambda body: (200, json.dumps({"choices": answers.pop(0)}))
    for _ in range(2):  # it spans an abort; it is complete before one
        (one,) = sampler.sample([np.array([2])], params, group_size=1)
        assert one.tokens.tolist() == said[:5]
        assert one.finish_reason == "stop"
        assert len(one.logprobs) == len(one.versions) == 5
    assert not answers
    asked = server.bodies[0]["sampling_params"]
    assert (asked["stop"], asked["detokenize"]) == (["</a>", "="], True)
    assert asked["include_stop_str_in_output"]
    assert not asked["skip_special_tokens"]


def test_unpublished_weights_are_an_error(server, sampler):
    span = [{"version": "default", "start": 0, "end": 1}]
    server.reply = lambda body: (
        200,
        json.dumps({"choices": [choice(0, [7], weight_versions=span)]}),
    )
    with pytest.raises(SamplerError, match="'default'"):
        ask(sampler, [2])


def scored(body):
    """Scores token id t of the prompt as -t / 8."""
    tokens = body["token_ids"]
    entries = [None, *({str(t): {"logprob": -t / 8}} for t in tokens[1:])]
    return 200, json.dumps({"choices": [choice(0, [9])], "prompt_logprobs": entries})


def test_given_tokens_are_scored_in_order(server, sampler):
    server.reply = scored
    sampler.use_version(4, urls=[server.url])
    found = sampler.score([np.array([2, 8, 4]), np.array([3]), np.arange(64)])
    np.testing.assert_array_equal(found[0], [np.nan, -1, -0.5])
    np.testing.assert_array_equal(found[1], [np.nan])
    # The server samples one token, so only 63 of 64 tokens can be scored.
    np.testing.assert_array_equal(found[2], [np.nan, *(-np.arange(1, 63) / 8), np.nan])
    assert sorted(len(body["token_ids"]) for body in server.bodies) == [1, 3, 63]
    assert all(body["sampling_params"]["prompt_logprobs"] == 0 for body in server.bodies)
    with pytest.raises(ValueError, match="positions"):
        sampler.score([np.arange(64), np.zeros(65, int)])


def test_scores_from_another_version_are_an_error(server, sampler):
    server.reply = scored
    sampler.use_version(5, urls=[server.url])
    with pytest.raises(SamplerError, match="scores with weights '4', but version 5"):
        sampler.score([np.array([2, 8])])


def test_closing_does_not_wait_for_requests(server, sampler):
    release = threading.Event()

    def hang(body):
        release.wait(SECONDS)
        return respond(body)

    server.reply = hang
    stream = sampler.sample([np.array([2])] * 5, PARAMS, group_size=1)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(list, stream)
        while server.busy < 2:
            time.sleep(0.01)
        sampler.close()
        assert server.busy == 2
        with pytest.raises(ClosedError):
            waiting.result()
        release.set()
    assert len(server.bodies) == 2


def test_equal_contexts_are_one_request(server, sampler):
    one, two = np.array([2, 3], np.int32), np.array([2, 4], np.int32)
    turns = [Turn(one, 1, 0, 5), Turn(one, 1, 1, 5), Turn(two, 1, 2, 5), Turn(two, 1, 3, 4)]
    found = {c.sample_index: len(c.tokens) for c in sampler.sample_turns(turns, PARAMS)}
    assert found == {0: 5, 1: 5, 2: 5, 3: 4}
    asked = sorted(
        (body["token_ids"], s["n"], s["max_tokens"], s["seed"])
        for body in server.bodies
        for s in [body["sampling_params"]]
    )
    base = asked[0][3]
    assert asked == [([2, 3], 2, 5, base), ([2, 4], 1, 4, base + 3), ([2, 4], 1, 5, base + 2)]
    server.bodies.clear()
    ask(sampler, [9], [2, 3], group_size=2)
    (seed,) = (b["sampling_params"]["seed"] for b in server.bodies if b["token_ids"] == [2, 3])
    assert seed == base
