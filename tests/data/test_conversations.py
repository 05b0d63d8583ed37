"""Conversations against transformers' own rendering, with published tokenizers and templates."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from jaxrl.config import toml_file
from jaxrl.config.supervised import SFTDataConfig
from jaxrl.data.pairs import PairColumns, read_pairs
from jaxrl.data.prompts import load_prompts
from jaxrl.data.rows import read_rows
from jaxrl.data.templates import Rendering, make_renderer, template_variables
from jaxrl.training.supervised.sft import load_texts
from tests import published
from tests.data.conversations import CLOCK, talk
from tests.huggingface.test_published_templates import FAMILIES, table

WITH_TOOLS = ("qwen2_5", "qwen3", "mistral_nemo")
WHOLE = {"prompt_key": "none", "completion_key": "messages"}
HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def write(directory: Path, *rows: Any, suffix: str = "jsonl") -> str:
    path = directory / f"rows.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def trained(name: str, path: str, **keys: Any) -> list[tuple[str, str]]:
    """Each sequence of `jaxrl sft` as text: what is read, what is trained."""
    tokenizer = published.tokenizer(name)
    config = toml_file.validate(SFTDataConfig, {"path": path} | WHOLE | keys)
    texts = load_texts(config, tokenizer, max_tokens=4000).sequences
    return [(tokenizer.decode(t.prompt), tokenizer.decode(t.completion)) for t in texts]


def expected(name: str, messages: Any, **variables: Any) -> list[tuple[str, str]]:
    """The same by transformers: the conversation up to each of the assistant's turns, without it
    and with it, which ends where the tokenizer's own end stands last."""
    tokenizer, found = published.tokenizer(name), []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, whole = (
            tokenizer.apply_chat_template(
                messages[: i + own],
                tokenize=False,
                add_generation_prompt=not own,
                tools=[CLOCK],
                **variables,
            )
            for own in (0, 1)
        )
        assert whole.startswith(before)
        end = tokenizer.eos_token
        found.append((before, whole[len(before) :].rpartition(end)[0] + end))
    return found


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("content", ["", None])
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_call_is_trained_as_transformers_renders_it(tmp_path: Path, name, content, suffix):
    # Beside rows of other keys, which a parquet file fills with None.
    rows = [{"messages": talk(content=content), "tools": [CLOCK]}, {"messages": HELLO}]
    found = trained(name, write(tmp_path, *rows, suffix=suffix))
    wanted = expected(name, talk())
    assert found[:2] == wanted
    assert '"clock", "arguments": {"city": "Oslo"}' in found[0][1]
    assert "Tells the time." not in found[2][0]  # the tools are their row's


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_arguments_may_be_a_text(tmp_path: Path, name):
    row = {"messages": talk(arguments='{"city": "Oslo"}'), "tools": json.dumps([CLOCK])}
    assert trained(name, write(tmp_path, row)) == expected(name, talk())


def test_thoughts_are_those_that_the_template_renders(tmp_path: Path):
    messages = talk()
    messages[1]["reasoning_content"] = "I ask the clock."
    messages[3]["reasoning_content"] = "It is late."
    row = {"messages": [*messages, *HELLO], "tools": [CLOCK]}
    found = trained("qwen3", write(tmp_path, row))
    assert found == expected("qwen3", row["messages"])
    assert found[0][1].startswith("<think>\nI ask the clock.\n</think>\n\n<tool_call>")
    assert "I ask the clock." in found[1][0]  # the template keeps the thoughts of this request
    assert "I ask" not in found[2][0]  # and drops those of earlier ones


def test_template_kwargs_are_the_templates_variables(tmp_path: Path):
    path, off = write(tmp_path, {"messages": HELLO}), {"enable_thinking": False}
    ((prompt, said),) = trained("qwen3", path, template_kwargs=off)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert said == "Hello<|im_end|>"
    ((prompt, said),) = trained("qwen3", path)
    assert prompt.endswith("<|im_start|>assistant\n")
    assert said == "<think>\n\n</think>\n\nHello<|im_end|>"


@pytest.mark.parametrize(
    ("name", "variable", "message"),
    [
        ("qwen3", "enable_thinkng", "does not read this variable; it reads enable_thinking"),
        ("llama3", "enable_thinking", "does not read this variable; it reads none"),
        ("qwen3", "content", "does not read this variable"),  # the template sets it itself
        ("qwen3", "tools", "jaxrl sets this variable itself"),
        ("qwen3", "messages", "jaxrl sets this variable itself"),
        ("qwen3", "add_generation_prompt", "jaxrl sets this variable itself"),
        ("qwen3", "tokenize", "jaxrl sets this variable itself"),
        ("gptoss", "reasoning_effort", "needs a chat template, but the model's tokenizer has none"),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_refused(name, variable, message):
    rendering = Rendering(template_kwargs={variable: False})
    with pytest.raises(ValueError, match=rf"template_kwargs\.{variable} = False.*{message}"):
        make_renderer(published.tokenizer(name), rendering)


def test_variables_with_defaults_are_read():
    class Templates:
        chat_template = (
            "{% if effort is not defined %}{% set effort = 'low' %}{% endif %}{% set own = 1 %}"
            "{% generation %}{{ effort }}{{ own }}{{ bos_token }}{% endgeneration %}{{ date }}"
        )

    assert template_variables(Templates()) == {"effort", "date"}  # type: ignore[arg-type]


THOUGHT = [HELLO[0], {**HELLO[1], "reasoning_content": "Be polite."}]
NAMED = [{**HELLO[0], "name": "Ada", "id": "7"}, HELLO[1]]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("llama3", {"messages": talk()}, r"message 2 \(assistant\): .* show tool_calls = "),
        ("gemma3", {"messages": talk()}, r"message 2 \(assistant\): .* show tool_calls = "),
        ("deepseek_v3", {"messages": talk()}, r"message 2 \(assistant\): .* show tool_calls = "),
        ("llama3_1", {"messages": HELLO, "tools": [CLOCK]}, "does not show the row's 'tools'"),
        ("gemma3", {"messages": HELLO, "tools": [CLOCK]}, "does not show the row's 'tools'"),
        ("qwen3", {"messages": HELLO, "tools": "hammer"}, "'tools' is 'hammer', expected a list"),
        ("qwen2_5", {"messages": THOUGHT}, r"message 2 \(assistant\): .* reasoning_content = 'Be"),
        ("mistral_nemo", {"messages": THOUGHT}, r"message 2 \(assistant\): .* reasoning_content"),
        (
            "qwen3",
            {"messages": [{**HELLO[0], "weight": 1}, HELLO[1]]},
            r"1 \(user\): .* weight = 1",
        ),
        (
            "qwen3",
            {"messages": [{"role": "developer", "content": "Be kind."}, *HELLO]},
            r"message 1 \(developer\): .* show content = 'Be kind.'",
        ),
        (
            "mistral_nemo",
            {"messages": [*talk()[:2], {"role": "tool", "content": "12:30"}, talk()[3]]},
            r"message 3 \(tool\): .*Tool call IDs",
        ),
        (
            "mistral_nemo",  # its template renders the calls alone
            {"messages": talk(content="Let me see.")},
            r"message 2 \(assistant\): .* show content = 'Let me see.'",
        ),
        (
            "qwen3",
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            r"'messages', message 1 \(user\): content holds .* read text alone",
        ),
        (
            "qwen3",
            {"messages": [HELLO[0], {"role": "assistant", "content": None}]},
            r"'messages', message 2 \(assistant\): content is None, expected a text",
        ),
        (
            "qwen3",
            {"messages": [HELLO[0], {"role": "assistant", "tool_calls": ["clock"]}]},
            r"'messages', message 2 \(assistant\): tool_calls holds 'clock', expected a list",
        ),
        ("qwen3", {"messages": [{"from": "human", "value": "Hi"}]}, "message 1: role is None"),
    ],
)
def test_what_is_not_rendered_is_refused(tmp_path: Path, name, row, message):
    path = write(tmp_path, {"messages": HELLO}, row)
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{message}"):
        trained(name, path)


def test_names_and_ids_need_no_rendering(tmp_path: Path):
    assert trained("qwen3", write(tmp_path, {"messages": NAMED})) == trained(
        "qwen3", write(tmp_path, {"messages": HELLO})
    )


@pytest.mark.parametrize("name", ["gemma3", "llama3", "qwen3"])
def test_content_may_be_parts(tmp_path: Path, name):
    def said(*texts: str) -> str:
        content = [{"type": "text", "text": text} for text in texts]
        row = {"messages": [{"role": "user", "content": content}, HELLO[1]]}
        return trained(name, write(tmp_path, row))[0][0]

    plain = trained(name, write(tmp_path, {"messages": HELLO}))[0][0]
    assert said("Hi") == plain
    joint = "" if name == "gemma3" else "\n"  # Gemma's template takes parts, the others do not
    assert said("Hi", "there") == plain.replace("Hi", f"Hi{joint}there")


def test_a_system_prompt_precedes_every_turn(tmp_path: Path):
    """Also with a template that drops it once its user message is answered."""
    path = write(tmp_path, {"messages": [*HELLO, *HELLO]})
    found = trained("mistral_nemo", path, system_prompt="Be kind.")
    assert found == [
        ("<s>[INST]Be kind.\n\nHi[/INST]", "Hello</s>"),
        ("<s>[INST]Hi[/INST]Hello</s>[INST]Be kind.\n\nHi[/INST]", "Hello</s>"),
    ]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_pairs_of_calls(tmp_path: Path, name):
    good, bad = talk()[:2], talk(arguments={"city": "Bergen"})[:2]
    path = write(tmp_path, {"chosen": good, "rejected": bad, "tools": [CLOCK]})
    tokenizer = published.tokenizer(name)
    (pair,) = read_pairs(
        read_rows(path),
        tokenizer,
        columns=PairColumns(None, "chosen", "rejected"),
        rendering=Rendering(),
        max_tokens=4000,
    ).pairs
    for one, messages in ((pair.chosen, good), (pair.rejected, bad)):
        text = (tokenizer.decode(one.prompt), tokenizer.decode(one.completion))
        assert [text] == expected(name, messages)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_prompts_of_reinforcement_learning(tmp_path: Path, name):
    """A prompt that ends with a tool's result, and the row's tools."""
    path = write(tmp_path, {"prompt": talk()[:3], "tools": [CLOCK], "answer": "12:30"})

    def load(rendering: Rendering) -> str:
        found = load_prompts(
            read_rows(path),
            published.tokenizer(name),
            prompt_key="prompt",
            answer_key="answer",
            rendering=rendering,
            max_tokens=4000,
        )
        return found.examples[0]["rendered_prompt"]

    assert load(Rendering()) == expected(name, talk())[1][0]
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: the row has 'tools', and so has env"):
        load(Rendering(tools=(CLOCK,)))
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: the prompt is a list of messages"):
        load(Rendering(template="text"))


@pytest.mark.parametrize(("family", "name"), FAMILIES.items())
def test_the_page_says_what_the_templates_show(family, name):
    tokenizer, cells = published.tokenizer(name), table()[family]

    def said(*, tools: Any = None, **keys: Any) -> str:
        messages = [HELLO[0], {**HELLO[1], "content": ""} | keys]
        return tokenizer.apply_chat_template(messages, tokenize=False, tools=tools)

    calls = talk()[1]["tool_calls"]
    shown = {
        "tools shown": said(tools=[CLOCK]) != said(),
        "calls shown": said(tool_calls=calls) != said(),
        "thoughts shown": said(reasoning_content="Hm.") != said(),
    }
    assert {key: cells[key] == "yes" for key in shown} == shown
    assert cells["variables"] == ", ".join(sorted(template_variables(tokenizer)))
