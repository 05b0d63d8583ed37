"""The published formats of tool calls.

A model writes a call as its chat template does. A format says where a call begins and ends, and how
to read what stands between.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

Parameters = Mapping[str, Mapping[str, Any]]
"""Of a tool: the JSON schema of each parameter."""


class ToolCall(NamedTuple):
    """A call that a model wrote; `error` describes a malformed one."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None
    id: str | None = None  # if the model wrote one


class Written(NamedTuple):
    """The text between the beginning and the end of a call."""

    text: str
    opening: re.Match[str]  # its group `tool` is the name, if the beginning has it
    tools: Mapping[str, Parameters]  # known tools, by name


class CallFormat(NamedTuple):
    """A format of calls."""

    begin: str  # a regular expression
    end: str  # a regular expression; a call without it is malformed
    read: Callable[[Written], Iterator[ToolCall]]  # raises ValueError or SyntaxError
    example: str  # what the text of a call should be, for the model


_TURN_END = r"(?=</s>|<\|eo[mt]_id\|>|<\|(?:im_)?end\|>|<end_of_turn>)|\Z"


def _object(value: Any) -> ToolCall:
    name = value.get("name") if isinstance(value, dict) else None
    arguments = isinstance(value, dict) and value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError
    given = value.get("id")
    return ToolCall(name, arguments, id=given if isinstance(given, str) else None)


def _json(call: Written) -> Iterator[ToolCall]:
    yield _object(json.loads(call.text))


def _json_list(call: Written) -> Iterator[ToolCall]:
    value = json.loads(call.text)
    yield from map(_object, value if isinstance(value, list) else [value])


def _bare_json(call: Written) -> Iterator[ToolCall]:
    """Reads objects with semicolons between them; an object of another kind is an answer."""
    text = call.text.strip()
    if call.opening["tag"] or re.search(r'"(?:parameters|arguments)"\s*:', text):
        while text:
            value, end = json.JSONDecoder().raw_decode(text)
            yield _object(value)
            text = text[end:].lstrip("; \n")


def _mistral(call: Written) -> Iterator[ToolCall]:
    """Reads a list of objects, or as newer models write it, the name before the arguments."""
    name, mark, arguments = call.text.partition("[ARGS]")
    if mark:
        name, _, given = name.partition("[CALL_ID]")
        yield _call(name, arguments)._replace(id=given or None)
    else:
        yield from _json_list(call)


def _harmony(call: Written) -> Iterator[ToolCall]:
    yield _call(call.opening["tool"], call.text)


def _deepseek(call: Written) -> Iterator[ToolCall]:
    name, mark, arguments = call.text.partition("<｜tool▁sep｜>")
    if fenced := re.fullmatch(r"([^\n]+)\n```json\n(.*)\n```\s*", arguments, re.DOTALL):
        name, arguments = fenced.groups()
    if not mark:
        raise ValueError
    yield _call(name, arguments)


def _call(name: str, arguments: str) -> ToolCall:
    value = json.loads(arguments)
    if not isinstance(value, dict):
        raise ValueError
    return ToolCall(name.strip(), value)


def _qwen_xml(call: Written) -> Iterator[ToolCall]:
    whole = re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", call.text, re.DOTALL)
    if not whole:
        raise ValueError
    name, body = whole.groups()
    pairs = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", body, re.DOTALL)
    yield ToolCall(name, _typed(dict(pairs), call.tools.get(name, {})))


def _glm_xml(call: Written) -> Iterator[ToolCall]:
    whole = re.fullmatch(r"\s*([^<>{}\s]+)\s*((?:<arg_key>.*)?)", call.text, re.DOTALL)
    if not whole:
        raise ValueError
    name, body = whole.groups()
    pair = r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
    yield ToolCall(name, _typed(dict(re.findall(pair, body, re.DOTALL)), call.tools.get(name, {})))


def _typed(arguments: Mapping[str, str], parameters: Parameters) -> dict[str, Any]:
    """Reads bare texts by their parameters' types: a text where the schema has one, else JSON or,
    as some templates write it, Python."""

    def typed(text: str, schema: Mapping[str, Any]) -> Any:
        kinds = [schema, *schema.get("anyOf", ())]
        if any(kind.get("type") == "string" for kind in kinds):
            nothing = text == "null" and any(kind.get("type") == "null" for kind in kinds)
            return None if nothing else text
        for read in (json.loads, _literal):
            try:
                return read(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
        return text

    return {key: typed(text, parameters.get(key, {})) for key, text in arguments.items()}


def _literal(written: str | ast.expr) -> Any:
    """Evaluates a literal of Python; raises ValueError, as for other faults, for a value that JSON
    does not have, such as a set."""
    try:
        value = ast.literal_eval(written)
        json.dumps(value)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return value


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def _pythonic(call: Written) -> Iterator[ToolCall]:
    """Reads Python's calls with literal arguments, in a list or on lines of their own."""
    for line in ast.parse(call.text.strip()).body:
        value = line.value if isinstance(line, ast.Expr) else None
        for item in value.elts if isinstance(value, ast.List) else [value]:
            if not isinstance(item, ast.Call) or item.args:
                raise ValueError
            given = {str(k.arg): _literal(_JsonNames().visit(k.value)) for k in item.keywords}
            yield ToolCall(ast.unparse(item.func), given)


def _function_gemma(call: Written) -> Iterator[ToolCall]:
    whole = re.fullmatch(r"\s*call:([\w.-]+)(\{.*\})\s*", call.text, re.DOTALL)
    if not whole:
        raise ValueError
    parts = whole[2].split("<escape>")  # every second one is a text
    parts[::2] = [re.sub(r"(\w+):", r'"\1":', part) for part in parts[::2]]
    parts[1::2] = map(json.dumps, parts[1::2])
    yield _call(whole[1], "".join(parts))


_OBJECT = '{"name": "...", "arguments": {...}}'
FORMATS = {
    "json": CallFormat("<tool_call>", "</tool_call>", _json, _OBJECT),
    "qwen": CallFormat(
        "<tool_call>",
        "</tool_call>",
        _qwen_xml,
        "<function=name><parameter=key>value</parameter></function>",
    ),
    "glm": CallFormat(
        "<tool_call>",
        "</tool_call>",
        _glm_xml,
        "name<arg_key>key</arg_key><arg_value>value</arg_value>",
    ),
    "mistral": CallFormat(
        r"\[TOOL_CALLS\]", rf"(?=\[TOOL_CALLS\])|{_TURN_END}", _mistral, f"[{_OBJECT}]"
    ),
    "deepseek": CallFormat(
        "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _deepseek, "name<｜tool▁sep｜>{...}"
    ),
    "harmony": CallFormat(
        r"(?:<\|channel\|>\w+ )?to=functions\.(?P<tool>[\w.-]+)[^{}]*?<\|message\|>",
        r"(?=<\|call\|>)|\Z",
        _harmony,
        "{...}, the arguments as JSON",
    ),
    "olmo": CallFormat("<function_calls>", "</function_calls>", _pythonic, 'name(key="value")'),
    "phi": CallFormat(
        r"<\|tool_call\|>|functools(?=\[)", rf"<\|/tool_call\|>|{_TURN_END}", _json_list, _OBJECT
    ),
    "gemma": CallFormat(
        "<start_function_call>",
        "<end_function_call>",
        _function_gemma,
        "call:name{key:<escape>value<escape>}",
    ),
    "llama": CallFormat(
        r'\A\s*(?P<tag><\|python_tag\|>|(?=\{\s*"(?:name|type)"))',
        _TURN_END,
        _bare_json,
        '{"name": "...", "parameters": {...}}',
    ),
    "python": CallFormat(r"\A\s*(?=\[\s*[\w.]+\()", _TURN_END, _pythonic, '[name(key="value")]'),
}
"""By name; the first that reads a template's example call is the template's."""
