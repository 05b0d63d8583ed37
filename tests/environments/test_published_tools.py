"""Tools in published templates: the table in docs/text.md, and episodes against transformers' own
rendering."""

from typing import Any

import numpy as np
import pytest

from jaxrl.environments import builtin
from jaxrl.environments.episodes.chat import Chat
from jaxrl.environments.episodes.tool_chat import ToolChat
from tests import published
from tests.environments.test_tool_formats import GIVEN, WEATHER
from tests.environments.test_tools import TOOLS
from tests.huggingface.test_published_templates import FAMILIES, table

NONE = np.zeros(0, np.int32)
USER = {"role": "user", "content": "hi"}
MARKS = ("<think>", "[THINK]", "<seed:think>")


def called(count: int) -> dict[str, Any]:
    """An assistant's message with calls."""
    calls = [
        {
            "type": "function",
            "function": {"name": "weather", "arguments": GIVEN | {"days": number}},
            "id": f"abcdefg{number:02}",
        }
        for number in range(count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def text_of(tokenizer: Any, messages: list[dict[str, Any]], **given: Any) -> str:
    """Transformers' own rendering."""
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **given
    )


def ids_of(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    return tokenizer.encode(text_of(tokenizer, messages), add_special_tokens=False)


@pytest.mark.parametrize(("family", "name"), FAMILIES.items())
def test_the_table_says_what_the_templates_do_with_tools(family, name):
    tokenizer, cells = published.tokenizer(name), table()[family]
    given = {"tools": [WEATHER.schema]}
    shown = text_of(tokenizer, [USER], **given) != text_of(tokenizer, [USER])
    assert shown == {"yes": True, "no": False}[cells["tools shown"]]
    assert cells["thoughts"] == "".join(m for m in MARKS if m in tokenizer.get_vocab())
    begin, _, end = cells["a call, as it is read back"].partition("{...}")
    assert bool(begin) == shown
    if begin:
        text = text_of(tokenizer, [USER, called(1)])
        assert begin in text.replace("\n", "")
        assert end in text.replace("\n", "").partition(begin)[2]
        chat = ToolChat(Chat(tokenizer), [WEATHER.schema])
        read = chat.read(np.array(tokenizer.encode(text, add_special_tokens=False)), prompt=NONE)
        assert [call.arguments for call in read.calls] == [GIVEN | {"days": 0}]


@pytest.mark.parametrize("name", ["gemma3", "llama3", "llama3_1", "deepseek_v3"])
def test_published_templates_without_tools_are_refused(name):
    context = builtin.EnvironmentContext(published.tokenizer(name), TOOLS)
    with pytest.raises(ValueError, match=rf"{name}.* does not show the tools weather, later"):
        builtin.agent(context)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "mistral_nemo"])
@pytest.mark.parametrize("count", [1, 2])
def test_published_templates_render_episodes_themselves(name, count):
    """Prompt, sampled calls and results are what the template makes of all messages."""
    made = published.tokenizer(name)
    chat = ToolChat(Chat(made), [WEATHER.schema])
    turns = [USER, called(count)]
    results = [
        {"role": "tool", "content": f"{7 + number}", "tool_call_id": call["id"]}
        for number, call in enumerate(turns[1]["tool_calls"])
    ]
    prompt = ids_of(made, [USER])
    whole = ids_of(made, [*turns, *results])
    end = whole.index(made.eos_token_id, len(prompt)) + 1
    turn = np.array(whole[len(prompt) : end], np.int32)
    read = chat.read(turn, prompt=np.array(prompt, np.int32)).calls
    assert [call.arguments["days"] for call in read] == list(range(count))
    answers = [{"role": "tool", "content": message["content"]} for message in results]
    seen = chat.results(answers, calls=read, after=turn)
    assert [*prompt, *turn, *seen] == whole
