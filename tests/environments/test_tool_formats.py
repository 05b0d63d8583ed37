"""Tool calls in the published formats, after thoughts, and the templates that are refused."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from jaxrl.environments import builtin
from jaxrl.environments.episodes.chat import Chat
from jaxrl.environments.episodes.tool_chat import ToolChat
from jaxrl.environments.tools.formats import FORMATS, ToolCall
from jaxrl.environments.tools.reading import read_calls
from jaxrl.environments.tools.schema import make_tool
from tests.environments.test_tools import QWEN_TOKENIZER, TOOLS, example, ids, tokenizer


def weather(city: str, days: int = 1, options: dict[str, bool] | None = None) -> str:
    """Says what the weather will be."""
    return f"{city}, {days}, {options}"


WEATHER = make_tool(weather)
TYPES = {"weather": WEATHER.schema["function"]["parameters"]["properties"]}
GIVEN = {"city": "New York", "days": 3, "options": {"wind": True}}
AS_JSON = json.dumps(GIVEN)
CALL = json.dumps({"name": "weather", "arguments": GIVEN})
LLAMA_CALL = json.dumps({"name": "weather", "parameters": GIVEN})

# What each family writes for a call, as its template or its model card shows it.
PUBLISHED = [
    ("json", f"<tool_call>\n{CALL}\n</tool_call><|im_end|>"),
    (
        "qwen",
        "<tool_call>\n<function=weather>\n<parameter=city>\nNew York\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=options>\n"
        '{"wind": true}\n</parameter>\n</function>\n</tool_call><|im_end|>',
    ),
    (
        "qwen",  # Qwen3-Coder's first template writes an object as Python does
        "<tool_call>\n<function=weather>\n<parameter=city>\nNew York\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=options>\n"
        "{'wind': True}\n</parameter>\n</function>\n</tool_call><|im_end|>",
    ),
    (
        "glm",
        "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>New York</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        '<arg_key>options</arg_key>\n<arg_value>{"wind": true}</arg_value>\n</tool_call>',
    ),
    ("mistral", f'[TOOL_CALLS][{CALL[:-1]}, "id": "VvvODy9mT"}}]</s>'),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{AS_JSON}</s>"),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]VvvODy9mT[ARGS]{AS_JSON}</s>"),
    (
        "deepseek",  # V3 and R1
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{AS_JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    ),
    (
        "deepseek",  # V3.1
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{AS_JSON}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    ),
    (
        "harmony",  # as the model writes it
        "<|channel|>analysis<|message|>Need it: to=functions.weather<|end|><|start|>assistant"
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{AS_JSON}<|call|>",
    ),
    (
        "harmony",  # as the template writes it
        f" to=functions.weather<|channel|>commentary json<|message|>{AS_JSON}<|call|>",
    ),
    (
        "olmo",
        '<function_calls>weather(city="New York", days=3, options={"wind": true})'
        "</function_calls><|im_end|>",
    ),
    ("phi", f"<|tool_call|>[{CALL}]<|/tool_call|><|end|>"),
    ("phi", f"functools[{CALL}]<|end|>"),
    (
        "gemma",
        "<start_function_call>call:weather{city:<escape>New York<escape>,days:3,"
        "options:{wind:true}}<end_function_call><start_function_response>",
    ),
    ("llama", f"{LLAMA_CALL}<|eot_id|>"),
    ("llama", f"<|python_tag|>{LLAMA_CALL}<|eom_id|>"),
    ("python", "[weather(city='New York', days=3, options={'wind': True})]<|eot_id|>"),
]


@pytest.mark.parametrize(("name", "text"), PUBLISHED)
def test_published_call_is_read(name, text):
    (call,) = read_calls(text, FORMATS[name], tools=TYPES).calls
    assert (call.name, call.arguments, call.error) == ("weather", GIVEN, None)
    assert call.id == ("VvvODy9mT" if "VvvODy9mT" in text else None)
    assert WEATHER.run(call.arguments) == "New York, 3, {'wind': True}"


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("llama", '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}<|eot_id|>', 2),
        ("llama", '{"name": "Ada", "born": 1815}', 0),  # an answer in JSON
        ("llama", 'Ada: {"name": "a", "parameters": {}}', 0),
        ("mistral", '[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b[ARGS]{"x": 1}</s>', 2),
        ("mistral", '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b"}]</s>', 2),
        ("python", "[a(x=1), b()]", 2),
        ("python", "[1, 2, 3]", 0),
        ("olmo", "<function_calls>a(x=1)\nb()</function_calls>", 2),
        ("json", "The answer is 4.", 0),
    ],
)
def test_calls_of_a_turn_are_counted(name, text, calls):
    read = read_calls(text, FORMATS[name], tools={}).calls
    assert [call.name for call in read] == ["a", "b"][:calls]
    assert not any(call.error for call in read)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen", "<tool_call>\nweather\n</tool_call>"),
        ("glm", "<tool_call>{}</tool_call>"),
        ("mistral", "[TOOL_CALLS]weather[ARGS]{"),
        ("deepseek", "<｜tool▁call▁begin｜>weather{}<｜tool▁call▁end｜>"),
        ("harmony", " to=functions.weather<|message|>[1]<|call|>"),
        ("olmo", "<function_calls>weather('Rome')</function_calls>"),
        ("python", "[weather(city=open('x'))]"),
        ("python", "[weather(city={[]: 1})]"),
        ("olmo", "<function_calls>weather(city={'Rome', 'Pisa'})</function_calls>"),
        ("llama", "<|python_tag|>print(1)<|eom_id|>"),
        ("gemma", "<start_function_call>weather<end_function_call>"),
        ("json", '<tool_call>{"name": "weather", "arguments": {"days": 1e999}}</tool_call>'),
        ("json", "<tool_call>"),
        ("json", "<tool_call></tool_call>"),
    ],
)
def test_a_malformed_call_is_told_to_the_model(name, text):
    (call,) = read_calls(text, FORMATS[name], tools=TYPES).calls
    assert call.error


@pytest.mark.parametrize("value", ["{1, 2}", "{[]: 1}", "b'3'", "{(1, 2): 3}", "1j", "[3"])
def test_a_value_that_json_does_not_have_is_a_text(value):
    text = "<tool_call><function=weather><parameter=days>{}</parameter></function></tool_call>"
    (call,) = read_calls(text.format(value), FORMATS["qwen"], tools=TYPES).calls
    assert call.arguments == {"days": value}


def drafted(expression: str) -> str:
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


ONE, TWO = drafted("1+1"), drafted("2+2")


@pytest.mark.parametrize(
    ("text", "prompt", "expressions"),
    [
        (f"<think>maybe {ONE}</think>2", "", []),
        (f"<think>maybe {ONE}</think>{TWO}", "", ["2+2"]),
        (f"maybe {ONE}</think>{TWO}", "<think>\n", ["2+2"]),  # the prompt begins the thought
        (f"maybe {ONE}</think>{TWO}", "", ["2+2"]),
        ("a <tool_call> is what I need</think>" + TWO, "", ["2+2"]),
        ("a <tool_call> is what I need</think>" + TWO, "<think>", ["2+2"]),
        ("<think>I need no <tool_call></think>2", "", []),
        ("I need no <tool_call></think>2", "", []),
        (f"<think>I call {ONE}", "", []),  # unclosed
        (f"I call {ONE}", "<think>\n", []),
        (f"I call {ONE}", "<think>\n\n</think>\n\n", ["1+1"]),
        (f"<think>a</think>{ONE}<think>b {ONE}</think>{TWO}", "", ["2+2"]),
        (f"{ONE}<think>rather not</think>2", "", []),
        (f"[THINK]{ONE}[/THINK]{TWO}", "", ["2+2"]),
        (f"<seed:think>{ONE}</seed:think>{TWO}", "", ["2+2"]),
        (f"{ONE} {TWO}", "", ["1+1", "2+2"]),
        (drafted("'<think>' + '</think>'"), "", ["'<think>' + '</think>'"]),  # an argument
    ],
)
def test_only_what_stands_after_the_last_thought_counts(text, prompt, expressions):
    chat = ToolChat(Chat(QWEN_TOKENIZER), [TOOLS["calculator"].schema])
    found = chat.read(ids(f"{text}<|im_end|>"), prompt=ids(f"x{prompt}"))
    assert [call.arguments.get("expression") for call in found.calls] == expressions
    assert not any(call.error for call in found.calls)


def test_a_drafted_call_is_not_executed():
    context = builtin.EnvironmentContext(QWEN_TOKENIZER, TOOLS)
    agent = builtin.agent(context, call_cost=0.25)
    asyncio.run(agent.reset(example("hi")))  # type: ignore[arg-type]
    step: Any = asyncio.run(agent.step(ids(f"<think>maybe {ONE}</think>2<|im_end|>")))  # type: ignore[arg-type]
    assert (step.done, step.reward) == (True, 0.0)
    assert step.metrics == {"tool_calls": 0, "tool_errors": 0}


SHOWN = "{% if tools %}{{ tools | tojson }}{% endif %}"
SAID = "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}{% endif %}"
REST = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (SAID + REST, "does not show the tools calculator"),
        ("{% if tools %}You may call tools.{% endif %}" + SAID + REST, "does not show the tools"),
        (SHOWN + SAID + REST, "does not write an assistant's tool_calls in a format that is read"),
        (
            SHOWN + SAID + "{% for c in m.tool_calls %}CALL {{ c }}{% endfor %}" + REST,
            r"writes .*CALL \{.*chat_template\.jinja",
        ),
    ],
)
def test_a_template_without_tools_is_refused(template, message):
    context = builtin.EnvironmentContext(tokenizer(template), {"calculator": TOOLS["calculator"]})
    with pytest.raises(ValueError, match=message):
        builtin.agent(context)


# How a template writes one call.
WRITTEN = {
    "json": "<tool_call>{{ c | tojson }}</tool_call>",
    "qwen": "<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v | tojson if v is mapping else v | string }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>",
    "glm": "<tool_call>{{ c.name }}{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>",
    "mistral": "[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}</s>",
    "olmo": "<function_calls>{{ c.name }}({% for k, v in c.arguments.items() %}"
    "{{ k }}={{ v | tojson }}{{ '' if loop.last else ', ' }}{% endfor %})</function_calls>",
    "phi": "<|tool_call|>{{ c | tojson }}<|/tool_call|>",
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("begins", ["", "<think>\n"])
def test_the_template_tells_the_format(name, begins):
    """A prompt that begins a thought, as Qwen3.5's, does not hide the example call."""
    calls = "{% for call in m.tool_calls %}{% set c = call.function %}" + WRITTEN[name]
    template = SHOWN + SAID + calls + "{% endfor %}" + REST.replace("ant>", "ant>" + begins)
    made = tokenizer(template)
    chat = ToolChat(Chat(made), [WEATHER.schema])
    function = {"name": "weather", "arguments": GIVEN}
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    whole = made.apply_chat_template([message], tokenize=False)
    turn = ids(whole.removeprefix("<assistant>"), made)
    assert chat.read(turn, prompt=ids("<assistant>", made)).calls == [ToolCall("weather", GIVEN)]
    drafted = ids("I could.</think>", made)
    later = chat.read(np.concatenate([drafted, turn]), prompt=ids("<think>\n", made))
    assert later.calls == [ToolCall("weather", GIVEN)]
    assert chat.read(turn, prompt=ids("<think>\n", made)).calls == []


ROLES = "{% for m in messages %}{% if m.role == 'tool' %}"
# As gpt-oss's and Llama 3.1's templates: a result needs the call before it, and is JSON.
HARMONY = (
    SHOWN
    + ROLES
    + "{% if not loop.previtem.tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    + "<|start|>functions.{{ loop.previtem.tool_calls[0].function.name }} to=assistant<|channel|>"
    + "commentary<|message|>{{ m.content | tojson }}<|end|>{% elif m.tool_calls %}<|start|>"
    + "assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json"
    + "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}"
    + "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
LLAMA = (
    SHOWN
    + ROLES
    + "<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    + "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% if 'tool_calls' in m %}"
    + "{% if m.tool_calls | length != 1 %}{{ raise_exception('one at once') }}{% endif %}"
    + '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    + "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}"
    + "<|eot_id|>{% endif %}{% endfor %}{% if add_generation_prompt %}"
    + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# As DeepSeek V3.1's: arguments are a text, and the policy's turn goes on after the results.
DEEPSEEK = (
    SHOWN
    + ROLES
    + "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% elif m.tool_calls %}"
    + "<｜Assistant｜></think>{{ m.content }}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
    + "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}"
    + "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>{% else %}"
    + "<｜User｜>{{ m.content }}{% endif %}{% endfor %}"
    + "{% if add_generation_prompt and messages[-1].role == 'user' %}"
    + "<｜Assistant｜></think>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "turn", "expected"),
    [
        (
            HARMONY,
            f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{AS_JSON}"
            "<|call|>",
            '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"sun"<|end|>'
            "<|start|>assistant",
        ),
        (
            LLAMA,
            f"{LLAMA_CALL}<|eot_id|>",
            '<|start_header_id|>ipython<|end_header_id|>\n\n"sun"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            LLAMA,  # the template writes single calls only, the model wrote two
            f"{LLAMA_CALL}; {LLAMA_CALL}<|eot_id|>",
            '<|start_header_id|>ipython<|end_header_id|>\n\n"sun"<|eot_id|>' * 2
            + "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            DEEPSEEK,
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{AS_JSON}"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
            "<｜tool▁output▁begin｜>sun<｜tool▁output▁end｜>",
        ),
        (
            DEEPSEEK,  # a turn that a stop text ended
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{AS_JSON}"
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
            "<｜tool▁output▁begin｜>sun<｜tool▁output▁end｜>",
        ),
    ],
)
def test_results_follow_the_turn_as_the_template_writes_them(template, turn, expected):
    made = tokenizer(template)
    made.add_tokens(sorted({*turn, *expected, *template} - set(map(chr, range(128)))))
    chat = ToolChat(Chat(made), [WEATHER.schema])
    after = ids(turn, made)
    read = chat.read(after, prompt=ids("x", made)).calls
    assert read == [ToolCall("weather", GIVEN)] * len(read)
    answers = [{"role": "tool", "content": "sun"}] * len(read)
    seen = chat.results(answers, calls=read, after=after)
    assert made.decode(seen) == expected
