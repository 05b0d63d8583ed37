"""Tools: typed functions, their JSON schemas, and the running of calls."""

import inspect
import json
import sys
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pydantic

from jaxrl.core import plugins
from jaxrl.environments.isolation.places import describe, raised_at
from jaxrl.environments.isolation.sandbox import SandboxError
from jaxrl.environments.tools import builtin
from jaxrl.environments.tools.formats import ToolCall
from jaxrl.environments.tools.search import make_search

_told = set[str]()
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ToolError(ValueError):
    """An error in a tool call, worded for the model."""


class ToolResult(NamedTuple):
    """The result of a call."""

    text: str  # for the model
    failed: bool


class Tool(NamedTuple):
    """A function that a model can call."""

    name: str
    schema: dict[str, Any]  # JSON schema in the form that chat templates take
    run: Callable[[Mapping[str, Any]], Any]  # raises ToolError for invalid arguments


def make_tool(function: Callable[..., Any]) -> Tool:
    """Makes a tool of a function with type hints, described by its docstring; raises ValueError
    without a docstring, or for a parameter without a type hint or not passable by name."""
    name, text = function.__name__, inspect.getdoc(function)
    if not text:
        raise ValueError(
            f"the tool {name} has no docstring; write one, the model reads it as the description"
        )
    hints, fields = typing.get_type_hints(function), {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in hints or parameter.kind not in _NAMED:
            raise ValueError(
                f"the parameter {parameter.name} of the tool {name} needs a type hint, and must be "
                "passable by name"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    strict = pydantic.ConfigDict(extra="forbid")
    model = pydantic.create_model(name, __config__=strict, **fields)
    parameters = model.model_json_schema()
    for key in ("title", "additionalProperties"):
        parameters.pop(key, None)
    for schema in parameters.get("properties", {}).values():
        schema.pop("title", None)

    def run(arguments: Mapping[str, Any]) -> Any:
        try:
            checked = model.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            wrong = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ToolError("; ".join(wrong)) from None
        return function(**{field: getattr(checked, field) for field in fields})

    described = {"name": name, "description": text, "parameters": parameters}
    return Tool(name, {"type": "function", "function": described}, run)


def load_tools(references: Sequence[str]) -> dict[str, Tool]:
    """Loads the tools of `environment.tools`, by name: `calculator`, `python`, `search:FILE`,
    `file.py:function` or `package.module:function`; raises ValueError for a tool that cannot be
    loaded or made, or two of the same name."""
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
        try:
            tool = make_tool(function)
        except ValueError as error:
            raise ValueError(f"environment.tools = {reference!r}: {error}") from error
        if tool.name in tools:
            raise ValueError(f"environment.tools names two tools {tool.name!r}; rename one")
        tools[tool.name] = tool
    return tools


async def run_tool_call(call: ToolCall, tools: Mapping[str, Tool]) -> ToolResult:
    """Runs a call; the result tells the model of errors in the call and exceptions of the tool.
    Raises SandboxError, because the model cannot repair the machine."""
    try:
        if call.error is not None:
            raise ToolError(call.error)
        if call.name not in tools:
            raise ToolError(f"unknown tool {call.name[:80]!r}; the tools are {', '.join(tools)}")
        result = tools[call.name].run(call.arguments)
        if inspect.isawaitable(result):
            result = await typing.cast(Awaitable[Any], result)
    except SandboxError:
        raise
    except ToolError as error:
        return ToolResult(f"Error: {error}", True)
    except Exception as error:
        _tell(call.name, error)
        return ToolResult(f"Error: {type(error).__name__}: {error}", True)
    return ToolResult(result if isinstance(result, str) else _as_text(result), False)


def _tell(name: str, error: Exception) -> None:
    """Shows the first exception of each of the user's tools: the model alone reads the others."""
    if raised_at(error) and name not in _told:
        _told.add(name)
        what = describe(error, function=_tell)
        print(f"jaxrl: the tool {name} failed: {what}", file=sys.stderr, flush=True)


def _as_text(result: Any) -> str:
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
