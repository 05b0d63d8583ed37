"""Tools: functions with type hints, their JSON schemas, and calls of them that a model has written.

The format is that of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

import inspect
import json
import re
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pydantic

from jaxrl.core import plugins
from jaxrl.environments.isolation.sandbox import SandboxError
from jaxrl.environments.tools import builtin
from jaxrl.environments.tools.search import make_search

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


class ToolError(ValueError):
    """What is wrong with a call, in words for the model."""


class Call(NamedTuple):
    """A call that a model has written; `wrong` says why it is none."""

    name: str
    arguments: Mapping[str, Any]
    wrong: str | None = None


class Tool(NamedTuple):
    """A function that a model can call.

    Attributes:
      name: by which it is called.
      schema: JSON schema, as chat templates take it.
      run: arguments -> what it returns; raises ToolError where they do not fit.
    """

    name: str
    schema: dict[str, Any]
    run: Callable[[Mapping[str, Any]], Any]


def make_tool(function: Callable[..., Any]) -> Tool:
    """A tool from a function whose parameters have type hints; its docstring is the description.

    Raises:
      ValueError: for a parameter without a type hint or that cannot be given by name, or a function
        without a docstring.
    """
    name, text = function.__name__, inspect.getdoc(function)
    if not text:
        raise ValueError(f"the tool {name} has no docstring: the model is told nothing about it")
    hints, fields = typing.get_type_hints(function), {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in hints or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
            parameter.POSITIONAL_ONLY,
        ):
            raise ValueError(
                f"the parameter {parameter.name} of the tool {name} needs a type hint and a name "
                "by which it is given"
            )
        given = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], given)
    strict = pydantic.ConfigDict(extra="forbid")
    model = pydantic.create_model(name, __config__=strict, **fields)
    described = {k: v for k, v in model.model_json_schema().items() if k != "title"}
    described.pop("additionalProperties", None)
    for one in described.get("properties", {}).values():
        one.pop("title", None)

    def run(arguments: Mapping[str, Any]) -> Any:
        try:
            checked = model.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            wrong = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ToolError("; ".join(wrong)) from None
        return function(**{field: getattr(checked, field) for field in fields})

    schema = {"name": name, "description": text, "parameters": described}
    return Tool(name, {"type": "function", "function": schema}, run)


def load_tools(references: Sequence[str]) -> dict[str, Tool]:
    """The tools that `environment.tools` names, by their names.

    Args:
      references: `calculator`, `python`, `search:FILE`, `file.py:function` or
        `package.module:function`.

    Raises:
      ValueError: for a reference that cannot be loaded, a function that makes no tool, or two tools
        of one name.
    """
    tools: dict[str, Tool] = {}
    for reference in references:
        name, _, corpus = reference.partition(":")
        if name == "search":
            if not corpus:
                raise ValueError(
                    "environment.tools names 'search' without a file to search; write 'search:FILE'"
                )
            function = make_search(corpus)
        else:
            function = plugins.load_function(reference, builtin=builtin, key="environment.tools")
        tool = make_tool(function)
        if tool.name in tools:
            raise ValueError(f"environment.tools names two tools {tool.name!r}")
        tools[tool.name] = tool
    return tools


def calls_in(text: str) -> list[Call]:
    """The calls in a turn, those that are wrong too."""
    return [_read(body, bool(end)) for body, end in _CALL.findall(text)]


def _read(body: str, ended: bool) -> Call:
    if not ended:
        return Call("", {}, "the call does not end with </tool_call>")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Call("", {}, f"the call is no JSON: {error}")
    name = content.get("name") if isinstance(content, dict) else None
    arguments = content.get("arguments", {}) if isinstance(content, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Call("", {}, 'a call is {"name": "...", "arguments": {...}}')
    return Call(name, arguments)


class Answer(NamedTuple):
    """What a call came to: the text for the model, and whether it is an error."""

    text: str
    failed: bool


async def answer(call: Call, tools: Mapping[str, Tool]) -> Answer:
    """Runs a call. What is wrong with it, or raised by the tool, is said to the model.

    Raises:
      SandboxError: if this machine offers no sandbox; the model can do nothing about that.
    """
    try:
        if call.wrong is not None:
            raise ToolError(call.wrong)
        if call.name not in tools:
            known = ", ".join(tools)
            raise ToolError(f"there is no tool {call.name[:80]!r}; there is {known}")
        found = tools[call.name].run(call.arguments)
        if inspect.isawaitable(found):
            found = await typing.cast(Awaitable[Any], found)
    except SandboxError:
        raise
    except ToolError as error:
        return Answer(f"Error: {error}", True)
    except Exception as error:
        return Answer(f"Error: {type(error).__name__}: {error}", True)
    return Answer(found if isinstance(found, str) else _shown(found), False)


def _shown(found: Any) -> str:
    try:
        return json.dumps(found, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(found)
