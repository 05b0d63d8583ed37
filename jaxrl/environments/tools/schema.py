"""Tools: typed functions, their JSON schemas, and the calls that a model writes.

Call format, from Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
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
    """An invalid call; the message is shown to the model."""


class Call(NamedTuple):
    """A call that a model wrote.

    Attributes:
      name: of the tool.
      arguments: by parameter name.
      wrong: the reason why the call is malformed; None if it is well-formed.
    """

    name: str
    arguments: Mapping[str, Any]
    wrong: str | None = None


class Tool(NamedTuple):
    """A function that a model can call.

    Attributes:
      name: the name that the model calls it by.
      schema: JSON schema, as chat templates take it.
      run: arguments -> result; raises ToolError if the arguments do not fit the schema.
    """

    name: str
    schema: dict[str, Any]
    run: Callable[[Mapping[str, Any]], Any]


def make_tool(function: Callable[..., Any]) -> Tool:
    """Makes a tool from a function with type hints; its docstring becomes the description.

    Raises:
      ValueError: if a parameter has no type hint or cannot be passed by name, or the function has
        no docstring.
    """
    name, text = function.__name__, inspect.getdoc(function)
    if not text:
        raise ValueError(f"the tool {name} has no docstring; write one, the model reads it")
    hints, fields = typing.get_type_hints(function), {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in hints or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
            parameter.POSITIONAL_ONLY,
        ):
            raise ValueError(
                f"the parameter {parameter.name} of the tool {name} must have a type hint and be "
                "passable by name"
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
    """Loads the tools listed in `environment.tools`; returns them by name.

    Args:
      references: `calculator`, `python`, `search:FILE`, `file.py:function` or
        `package.module:function`.

    Raises:
      ValueError: if a reference cannot be loaded, a function is not a valid tool, or two tools have
        the same name.
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
    """Parses the calls in a turn, including malformed ones."""
    return [_read(body, bool(end)) for body, end in _CALL.findall(text)]


def _read(body: str, ended: bool) -> Call:
    if not ended:
        return Call("", {}, "the call does not end with </tool_call>")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Call("", {}, f"the call is not JSON: {error}")
    name = content.get("name") if isinstance(content, dict) else None
    arguments = content.get("arguments", {}) if isinstance(content, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Call("", {}, 'a call is {"name": "...", "arguments": {...}}')
    return Call(name, arguments)


class Answer(NamedTuple):
    """The result of a call.

    Attributes:
      text: shown to the model.
      failed: true if the text is an error.
    """

    text: str
    failed: bool


async def answer(call: Call, tools: Mapping[str, Tool]) -> Answer:
    """Runs a call. Errors in the call and exceptions of the tool become text for the model.

    Raises:
      SandboxError: if this machine has no sandbox, which the model cannot fix.
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
