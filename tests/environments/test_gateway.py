"""The gateway: agents that take the policy for a model of OpenAI or Anthropic, as episodes. Bodies
are those that the official clients send."""

import asyncio
import contextlib
import functools
import json
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import pytest

from jaxrl.core.batch import Rollout, from_json, to_json
from jaxrl.data.prompts import Example
from jaxrl.environments import builtin
from jaxrl.environments.connectors.agents import run_command, run_function
from jaxrl.environments.episodes.base import EpisodeLimits
from jaxrl.environments.episodes.gateway import GatewayEpisode
from jaxrl.environments.episodes.runner import ContinuousScheduler, EpisodeRunner
from jaxrl.environments.gateway import server
from jaxrl.sampling.base import SamplingParams
from tests import published
from tests.environments.agents import (
    Scripted,
    chat,
    message_of,
    result,
    sampled,
    sequences,
    stream,
    trained,
    user,
)

post = functools.partial(httpx2.post, timeout=100)
LIMITS = EpisodeLimits(
    max_turns=8, max_tokens=300, max_prompt_tokens=300, timeout=100.0, vocab_size=200_000
)
ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOL = {"type": "function", "function": ADD}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
SAID = "4<|im_end|>"
"""Turns of the policy."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return published.tokenizer("qwen3")


@pytest.fixture(scope="module")
def play(tokenizer) -> Callable[..., tuple[Rollout, Scripted, str | None]]:
    """Plays one episode of an agent with the texts of the policy."""

    def play(agent: Any, texts: list[str], *, row: Mapping[str, Any] | None = None, **limits: Any):
        bounds = LIMITS._replace(**limits)
        context = builtin.EnvironmentContext(tokenizer, {}, limits=bounds)
        start = functools.partial(run_function, agent)
        if isinstance(agent, list):
            start = functools.partial(run_command, agent)
        make = functools.partial(builtin._agent_episode, context, start)
        sampler = Scripted(tokenizer, texts)
        runner = EpisodeRunner(make, bounds, ContinuousScheduler)
        found = runner.run(
            {5: Example(np.array([2]), row or {"prompt": "-"}, {})},
            sampler=sampler,
            params=SamplingParams(max_tokens=300),
            group_size=1,
        )
        return found.rollouts[0], sampler, found.first_failure

    return play


def test_a_conversation_is_one_sequence_of_the_sampled_tokens(play, tokenizer):
    said = list[Any]()

    def agent(endpoint, example):
        messages = [{"role": "system", "content": "Add."}, user(example["prompt"])]
        first = message_of(chat(endpoint.url, messages, tools=[TOOL]))
        said.append(first)
        messages += [first, result(first, "4")]
        said.append(message_of(chat(endpoint.url, messages, tools=[TOOL])))
        return 0.5

    thought = f"<think>\nI add.\n</think>\n\nSo:\n{CALL}"
    rollout, sampler, failure = play(agent, [thought, SAID], row={"prompt": "2+2?"})
    assert failure is None
    first, last = said
    assert (first["content"].strip(), first["reasoning_content"]) == ("So:", "I add.")
    assert json.loads(first["tool_calls"][0]["function"]["arguments"]) == {"a": 2}
    assert last["content"] == "4"
    assert rollout.branches == ()
    assert trained(rollout) == sampled(sampler)
    # What the policy read is what transformers renders, and holds its own ids unchanged.
    messages = [{"role": "system", "content": "Add."}, user("2+2?")]
    text = tokenizer.apply_chat_template(
        messages, tools=[TOOL], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(rollout.prompt) == text
    whole = tokenizer.decode(rollout.completion)
    between = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
    assert whole == f"{thought}{between}<|im_start|>assistant\n{SAID}"
    assert [reward for _, _, reward in rollout.episode.turns] == [0, 0.5]
    assert rollout.episode.end == "done"
    again = from_json(json.loads(json.dumps(to_json(rollout))))
    assert again.completion.tolist() == rollout.completion.tolist()


def test_an_edited_history_is_a_branch_and_each_token_is_trained_once(play):
    def agent(endpoint, example):
        start = [user("2+2?")]
        first = message_of(chat(endpoint.url, start, tools=[TOOL]))
        for text in ("4", "four", "4"):  # a result, another one instead, and the first again
            more = [*start, first, result(first, text)]
            answer = message_of(chat(endpoint.url, more, tools=[TOOL]))
        chat(endpoint.url, [*more, answer, user("sure?")], tools=[TOOL])
        chat(endpoint.url, [user("A summary: 2+2 is 4. Go on.")], tools=[TOOL])

    texts = [CALL, "it is 4<|im_end|>", "four!<|im_end|>", "4<|im_end|>", "yes<|im_end|>", "ok"]
    rollout, sampler, failure = play(agent, texts)
    assert failure is None
    assert len(sampler.sampled) == 6
    parts = sequences(rollout)
    assert len(parts) == 4  # three after the first call, and the summary
    assert trained(rollout) == sampled(sampler)
    assert from_json(to_json(rollout)).branches[0].action_mask.any()
    # Every token stands after the context from which it was sampled.
    for context, done in zip(sampler.contexts, sampler.sampled, strict=True):
        wholes = [np.concatenate([one.prompt, one.completion]).tolist() for one in parts]
        begun = [*context.tolist(), *done.tokens.tolist()]
        assert any(whole[: len(begun)] == begun for whole in wholes)
    assert rollout.episode.metrics["branches"] == 3


def test_agents_at_once_and_rewards_that_they_post(play):
    async def agent(endpoint, example):
        async with httpx2.AsyncClient(timeout=100) as client:

            async def ask(text):
                body = {"model": "policy", "messages": [user(text)]}
                headers = {"authorization": f"Bearer {endpoint.key}"}  # the key as a header
                base = endpoint.url.partition("/s/")[0]
                url = f"{base}/v1/chat/completions"
                return message_of(await client.post(url, json=body, headers=headers))["content"]

            begun = {"reward": 0.5}  # before the first turn
            assert (await client.post(f"{endpoint.url}/reward", json=begun)).status_code == 200
            found = await asyncio.gather(*(ask(text) for text in ("a", "b", "c")))
            reward = {"reward": 2, "metrics": {"found": len(found)}}
            assert (await client.post(f"{endpoint.url}/reward", json=reward)).status_code == 200

    rollout, sampler, failure = play(agent, ["1<|im_end|>", "2<|im_end|>", "3<|im_end|>"])
    assert failure is None
    assert len(rollout.branches) == 2
    assert trained(rollout) == sampled(sampler)
    assert sum(reward for _, _, reward in rollout.episode.turns) == 2.5
    assert rollout.episode.metrics["found"] == 3


def test_stop_texts_and_limits_end_a_turn_where_sampling_would_end(play, tokenizer):
    replies = list[Any]()

    def agent(endpoint, example):
        replies.append(chat(endpoint.url, [user("a")], stop=["\nObservation:"]))
        replies.append(chat(endpoint.url, [user("b")], max_completion_tokens=3))
        body = {"model": "policy", "max_tokens": 9, "messages": [user("c")]}
        body["stop_sequences"] = ["STOP"]
        replies.append(post(f"{endpoint.url}/v1/messages", json=body))
        replies.append(chat(endpoint.url, [user("d")], stop=["\n", "。"]))

    texts = ["Act: f\nObservation: 3 and on<|im_end|>", "abcdef<|im_end|>", "x STOP<|im_end|>"]
    rollout, sampler, _ = play(agent, [*texts, "好。\n\n<|im_end|>"])  # "。\n\n" is one token
    first, second, third, fourth = (reply.json() for reply in replies)
    assert first["choices"][0]["message"]["content"] == "Act: f"
    assert first["choices"][0]["finish_reason"] == "stop"
    assert second["choices"][0]["message"]["content"] == "abc"
    assert second["choices"][0]["finish_reason"] == "length"
    assert second["usage"]["completion_tokens"] == 3
    assert second["usage"]["prompt_tokens"] == len(sampler.contexts[1])
    assert (third["stop_reason"], third["stop_sequence"]) == ("stop_sequence", "STOP")
    assert third["usage"]["output_tokens"] == len("x STOP")
    assert fourth["choices"][0]["message"]["content"] == "好"
    kept = [tokenizer.decode(one.completion[one.action_mask]) for one in sequences(rollout)]
    assert kept == ["Act: f\nObservation:", "abc", "x STOP", "好。\n\n"]
    assert set(trained(rollout)) < set(sampled(sampler))


def test_anthropic_messages_and_openai_responses_are_the_same_conversation(play, tokenizer):
    """The same episode in three dialects, the last two streamed, as their clients echo it."""

    def openai(endpoint, example):
        messages = [{"role": "system", "content": "Add."}, user("2+2?")]
        first = message_of(chat(endpoint.url, messages, tools=[TOOL]))
        chat(endpoint.url, [*messages, first, result(first, "4")], tools=[TOOL])

    def anthropic(endpoint, example):
        tool = {"name": "add", "description": "Adds.", "input_schema": ADD["parameters"]}
        body = {"model": "policy", "max_tokens": 99, "system": "Add.", "tools": [tool]}
        messages: list[Any] = [user("2+2?")]
        events = stream(f"{endpoint.url}/v1/messages", body | {"messages": messages})
        assert [e["type"] for e in events][-2:] == ["message_delta", "message_stop"]
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        text, call = (e["content_block"] for e in events if e["type"] == "content_block_start")
        deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
        blocks = [
            text | {"text": deltas[0]["text"]},
            call | {"input": json.loads(deltas[1]["partial_json"])},
        ]
        given = {"type": "tool_result", "tool_use_id": call["id"], "content": "4"}
        messages += [{"role": "assistant", "content": blocks}, user([given])]
        whole = post(f"{endpoint.url}/v1/messages", json=body | {"messages": messages})
        assert whole.json()["content"] == [{"type": "text", "text": "4"}]
        assert whole.json()["stop_reason"] == "end_turn"

    def responses(endpoint, example):
        body = {"model": "policy", "instructions": "Add.", "tools": [{"type": "function"} | ADD]}
        url, items = f"{endpoint.openai_url}/responses", [user("2+2?")]
        events = stream(url, body | {"input": items})
        assert [e["sequence_number"] for e in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed"
        output = events[-1]["response"]["output"]
        assert [item["type"] for item in output] == ["message", "function_call"]
        given = {"type": "function_call_output", "call_id": output[1]["call_id"], "output": "4"}
        whole = post(url, json=body | {"input": [*items, *output, given]}).json()
        assert whole["output"][0]["content"][0]["text"] == "4"
        assert whole["usage"]["total_tokens"] > whole["usage"]["output_tokens"]

    texts = [f"So.\n{CALL}", SAID]
    found = list[Any]()
    for agent in (openai, anthropic, responses):
        rollout, sampler, failure = play(agent, texts)
        assert failure is None
        assert trained(rollout) == sampled(sampler)
        found.append((rollout.prompt.tolist(), rollout.completion.tolist(), rollout.branches))
    assert found[0] == found[1] == found[2]


def test_refusals_have_the_form_of_each_dialect(play, monkeypatch):
    monkeypatch.setattr(server, "_MOST_BYTES", 10_000)
    replies = dict[str, Any]()

    def agent(endpoint, example):
        long = "word " * 400
        image = [{"type": "image_url", "image_url": {"url": "data:"}}]
        first = message_of(chat(endpoint.url, [user("hello")]))
        replies["unfinished"] = chat(endpoint.url, [user("hello"), first])
        replies["model"] = chat(endpoint.url, [user("a")], model="gpt-4o")
        replies["long"] = chat(endpoint.url, [user(long)])
        replies["image"] = chat(endpoint.url, [user(image)])
        replies["n"] = chat(endpoint.url, [user("a")], n=2)
        replies["grammar"] = chat(
            endpoint.url, [user("a")], response_format={"type": "json_object"}
        )
        replies["body"] = chat(endpoint.url, [{"content": "a"}])
        replies["bytes"] = chat(endpoint.url, [user("a" * 10_000)])
        replies["key"] = chat(endpoint.url.rpartition("/")[0] + "/wrong", [user("a")])
        body = {"model": "claude", "max_tokens": 9, "messages": [user("a")]}
        url = f"{endpoint.url}/v1/messages"
        replies["anthropic model"] = post(url, json=body)
        replies["anthropic long"] = post(
            url, json=body | {"model": "policy", "messages": [user(long)]}
        )
        replies["anthropic key"] = post(url.replace(endpoint.key, "x"), json=body)
        replies["anthropic body"] = post(url, json={"model": "policy"})
        stored = {"model": "policy", "input": "a", "previous_response_id": "resp_1"}
        replies["stored"] = post(f"{endpoint.openai_url}/responses", json=stored)

    rollout, sampler, failure = play(agent, ["hi<|im_end|>"])
    assert failure is None
    assert len(sampler.sampled) == len(rollout.episode.turns) == 1  # a refusal takes no turn
    codes = {name: reply.json()["error"].get("code") for name, reply in replies.items()}
    statuses = {name: reply.status_code for name, reply in replies.items()}
    assert (statuses["model"], codes["model"]) == (404, "model_not_found")
    assert (statuses["long"], codes["long"]) == (400, "context_length_exceeded")
    assert (statuses["key"], codes["key"]) == (401, "invalid_api_key")
    assert "more than 10000 bytes" in replies["bytes"].text
    for name in ("unfinished", "image", "n", "grammar", "body", "bytes", "stored"):
        assert statuses[name] == 400, name
        assert replies[name].json()["error"]["type"] == "invalid_request_error"
    assert "data.max_prompt_tokens = 300" in replies["long"].json()["error"]["message"]
    kinds = {n: r.json()["error"]["type"] for n, r in replies.items() if "anthropic" in n}
    assert all(replies[name].json()["type"] == "error" for name in kinds)
    assert [(statuses[n], kinds[n]) for n in kinds] == [
        (404, "not_found_error"),
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (400, "invalid_request_error"),
    ]


def test_a_full_conversation_is_refused_and_a_new_one_goes_on(play):
    replies = list[Any]()

    def agent(endpoint, example):
        first = chat(endpoint.url, [user("a")])
        replies.append(first)
        replies.append(chat(endpoint.url, [user("a"), message_of(first), user("more")]))
        replies.append(chat(endpoint.url, [user("a summary")]))
        return 1.0

    rollout, _, failure = play(agent, ["x" * 50, "end<|im_end|>"], max_tokens=20)
    assert failure is None
    assert replies[0].json()["choices"][0]["finish_reason"] == "length"
    assert replies[1].json()["error"]["code"] == "context_length_exceeded"
    assert message_of(replies[2])["content"] == "end"
    assert (rollout.episode.end, rollout.truncated) == ("done", False)
    assert [len(one.completion) for one in sequences(rollout)] == [20, 4]


PROGRAM = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = {"model": os.environ["JAXRL_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}
def post(url, content):
    request = urllib.request.Request(url, json.dumps(content).encode())
    return json.load(urllib.request.urlopen(request))
said = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
if row["answer"] == "fail":
    sys.exit("it crashed")
right = said["choices"][0]["message"]["content"] == row["answer"]
post(os.environ["JAXRL_REWARD_URL"], {"reward": float(right)})
"""


def test_a_command_is_an_agent_and_its_failure_that_of_its_episode(play, tokenizer):
    command = [sys.executable, "-c", PROGRAM, "What is {prompt}?"]
    rollout, _, failure = play(command, [SAID], row={"prompt": "2+2, {answer}", "answer": "4"})
    assert failure is None
    assert "What is 2+2, {answer}?" in tokenizer.decode(rollout.prompt)
    assert [reward for _, _, reward in rollout.episode.turns] == [1]
    rollout, _, failure = play(command, [SAID], row={"prompt": "2+2", "answer": "fail"})
    assert "ended with status 1: it crashed" in failure
    assert rollout.episode.end == "error"
    assert not rollout.action_mask.any()
    _, _, failure = play([sys.executable, "-c", "pass"], [])
    assert "without a request" in failure
    # A process that the command leaves behind holds its standard error open.
    leaves = f"import subprocess\nsubprocess.Popen(['sleep', '999'])\n{PROGRAM}"
    rollout, _, failure = play([sys.executable, "-c", leaves, "a"], [SAID], row={"answer": "4"})
    assert (failure, rollout.episode.end) == (None, "done")


def test_an_agent_that_hangs_or_goes_on_ends_at_the_limits(play):
    refused = list[Any]()

    def endless(endpoint, example):
        while True:
            reply = chat(endpoint.url, [user("again")])
            if reply.status_code != 200:
                refused.append(reply)
                return

    rollout, sampler, _ = play(endless, [SAID] * 9, max_turns=3)
    assert (rollout.episode.end, len(sampler.sampled)) == ("max_turns", 3)
    rollout, _, failure = play([sys.executable, "-c", "import time; time.sleep(99)"], [], timeout=1)
    assert rollout.episode.end == "timeout"
    assert "took longer than 1 s" in failure


def test_episodes_that_begin_together_share_a_server(monkeypatch):
    made, both = list[Any](), threading.Barrier(2)

    class Slow(server.Gateway):
        def __init__(self, *arguments: Any) -> None:
            made.append(self)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.2)  # another thread makes one meanwhile, if it may
            super().__init__(*arguments)

    monkeypatch.setattr(server, "Gateway", Slow)
    with ThreadPoolExecutor(2) as pool:
        arguments = "127.0.0.1", 0, ("of this test",)
        one, other = pool.map(lambda _: builtin._gateway(*arguments), range(2))
    for gateway in made:
        gateway.stop()
    assert one is other


def test_wrong_settings_name_their_key(tokenizer):
    context = builtin.EnvironmentContext(tokenizer, {}, limits=LIMITS)
    for given, message in (
        ({}, "environment.agent and environment.command"),
        ({"agent": "a", "command": ["b"]}, "environment.agent and environment.command"),
        ({"agent": "nowhere.py:run"}, r"environment\.agent = 'nowhere.py:run'"),
        ({"command": ["b"], "host": "192.0.2.1"}, r"environment\.host = '192\.0\.2\.1'"),
    ):
        with pytest.raises(ValueError, match=message):
            builtin.gateway(context, **given)
    assert isinstance(builtin.gateway(context, command=["b"]), GatewayEpisode)
