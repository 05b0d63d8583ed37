"""The official clients of OpenAI and Anthropic, unchanged, at the gateway."""

import json
from typing import Any

import anthropic
import openai
import pytest

from tests.environments.agents import chat, message_of, result, sampled, sequences, trained, user
from tests.environments.test_gateway import ADD, CALL, SAID, TOOL, play, post, tokenizer

__all__ = ["play", "tokenizer"]  # fixtures
SYSTEM = {"role": "system", "content": "Add."}
USER = {"role": "user", "content": "2+2?"}


@pytest.mark.parametrize("streamed", [False, True])
def test_openai_chat_completions(play, streamed):
    def agent(endpoint, example):
        with openai.OpenAI(base_url=endpoint.openai_url, api_key=endpoint.key) as client:
            assert [model.id for model in client.models.list()] == [endpoint.model]
            messages: list[Any] = [SYSTEM, USER]

            def ask() -> Any:
                given: Any = {"model": endpoint.model, "messages": messages, "tools": [TOOL]}
                if not streamed:
                    return client.chat.completions.create(**given).choices[0]
                with client.chat.completions.stream(**given) as events:
                    for _ in events:
                        pass
                    return events.get_final_completion().choices[0]

            first = ask()
            assert first.finish_reason == "tool_calls"
            (call,) = first.message.tool_calls
            assert json.loads(call.function.arguments) == {"a": 2}
            messages.append(first.message.model_dump(exclude_none=True, exclude={"parsed"}))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "4"})
            assert ask().message.content == "4"

    check(play, agent)


@pytest.mark.parametrize("streamed", [False, True])
def test_openai_responses(play, streamed):
    def agent(endpoint, example):
        with openai.OpenAI(base_url=endpoint.openai_url, api_key=endpoint.key) as client:
            items: list[Any] = [USER]

            def ask() -> Any:
                given: Any = {"model": endpoint.model, "input": items, "instructions": "Add."}
                given["tools"] = [{"type": "function", "strict": False, **ADD}]
                if not streamed:
                    return client.responses.create(**given)
                with client.responses.stream(**given) as events:
                    for _ in events:
                        pass
                    return events.get_final_response()

            first = ask()
            *_, call = first.output
            assert json.loads(call.arguments) == {"a": 2}
            items += first.output
            given = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
            items.append(given)
            last = ask()
            assert (last.output_text, last.status) == ("4", "completed")

    check(play, agent)


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropic_messages(play, streamed):
    def agent(endpoint, example):
        with anthropic.Anthropic(base_url=endpoint.url, api_key=endpoint.key) as client:
            messages: list[Any] = [USER]
            tool = {
                "name": "add",
                "description": ADD["description"],
                "input_schema": ADD["parameters"],
            }

            def ask() -> Any:
                given: Any = {"model": endpoint.model, "messages": messages, "max_tokens": 200}
                given |= {"system": "Add.", "tools": [tool]}
                if not streamed:
                    return client.messages.create(**given)
                with client.messages.stream(**given) as events:
                    return events.get_final_message()

            first = ask()
            assert first.stop_reason == "tool_use"
            *_, call = first.content
            assert call.input == {"a": 2}
            messages.append({"role": "assistant", "content": first.content})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "4"}
            messages.append({"role": "user", "content": [result]})
            last = ask()
            assert (last.content[0].text, last.stop_reason) == ("4", "end_turn")
            assert last.usage.output_tokens == 2

    check(play, agent)


def test_anthropics_loop_over_tools(play):
    """It begins a thread on the server, is refused and sends whole conversations."""

    @anthropic.beta_tool
    def add(a: int) -> str:
        """Adds."""
        return str(a + 2)

    def agent(endpoint, example):
        with anthropic.Anthropic(base_url=endpoint.url, api_key=endpoint.key) as client:
            runner = client.beta.messages.tool_runner(
                model=endpoint.model, max_tokens=200, tools=[add], messages=[USER]
            )
            assert runner.until_done().content[-1].text == "4"

    check(play, agent)


def check(play: Any, agent: Any) -> None:
    rollout, sampler, failure = play(agent, [f"I call.\n{CALL}", SAID])
    assert failure is None
    assert rollout.branches == ()
    assert trained(rollout) == sampled(sampler)


def test_clients_know_the_refusals(play):
    def agent(endpoint, example):
        long = [USER | {"content": "word " * 400}]
        with openai.OpenAI(base_url=endpoint.openai_url, api_key="k") as client:
            create = client.chat.completions.create
            with pytest.raises(openai.NotFoundError, match="'gpt-4o' is not here"):
                create(model="gpt-4o", messages=[USER])
            with pytest.raises(openai.BadRequestError) as found:
                create(model=endpoint.model, messages=long)
            assert found.value.code == "context_length_exceeded"
            create(model=endpoint.model, messages=[USER])
        base = endpoint.url.partition("/s/")[0]
        wrong = openai.OpenAI(base_url=f"{base}/v1", api_key="wrong")
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        with anthropic.Anthropic(base_url=base, api_key=endpoint.key) as client:  # in a header
            create = client.messages.create
            with pytest.raises(anthropic.NotFoundError, match="'claude' is not here"):
                create(model="claude", max_tokens=9, messages=[USER])
            with pytest.raises(anthropic.BadRequestError, match="max_prompt_tokens"):
                create(model=endpoint.model, max_tokens=9, messages=long)

    _, sampler, failure = play(agent, [SAID])
    assert failure is None
    assert len(sampler.sampled) == 1


def test_a_call_that_no_answer_can_hold_is_answered(play):
    """A model may write the escape of half an emoji, or a number that is infinite."""
    replies = list[Any]()
    call = CALL.replace("2", '"\\ud83d!"')

    def agent(endpoint, example):
        reply = chat(endpoint.url, [user("a")], tools=[TOOL])
        replies.append(reply)
        said = message_of(reply)
        chat(endpoint.url, [user("a"), said, result(said, "no")], tools=[TOOL])
        body = {"model": "policy", "max_tokens": 99, "messages": [user("b")]}
        body["tools"] = [{"name": "add", "input_schema": ADD["parameters"]}]
        replies.extend(post(f"{endpoint.url}/v1/messages", json=body) for _ in range(2))

    infinite = CALL.replace("2", "1e999")
    rollout, _, failure = play(agent, [call, SAID, call, infinite])
    assert failure is None
    assert message_of(replies[0])["tool_calls"][0]["function"]["arguments"] == '{"a": "?!"}'
    assert replies[1].json()["content"][0]["input"] == {"a": "?!"}
    assert "1e999" in replies[2].json()["content"][0]["text"]  # no call, as JSON has no such number
    assert [len(one.episode.turns) for one in sequences(rollout)] == [2, 1, 1]
