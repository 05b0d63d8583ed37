"""Messages of a conversation and the tools that a row offers, as they stand in the data."""

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data.rows import read_column

Message = dict[str, Any]
"""A message: role, content and any further keys that the chat template renders."""

RawPrompt = str | list[Message]
"""A prompt as it stands in the data: a text, or messages with role and content."""

REFERENCES = frozenset({"name", "id", "tool_call_id"})
"""Keys of a message that a template may leave out: they name a message and say nothing."""


def read_prompt(
    record: Mapping[str, Any], key: str, *, where: str, setting: str | None = None
) -> RawPrompt:
    """Returns the prompt of a column, without the keys of messages that are None. `setting` is as
    for `read_column`.

    Raises:
      ValueError: if it is neither a text nor messages; it names the message and its key.
    """
    value = read_column(record, key, where=where, setting=setting)
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple, np.ndarray)) or not len(value):
        raise ValueError(
            f"{where}: {key!r} is {value!r:.80}, expected a text or a list of {{role, content}} "
            "messages"
        )
    return [
        _read_message(message, where=f"{where}: {key!r}, message {number}")
        for number, message in enumerate(value, start=1)
    ]


def read_tools(record: Mapping[str, Any], *, where: str) -> tuple[Mapping[str, Any], ...]:
    """Returns the tools of a row: its column "tools", a list of JSON schemas or the JSON text of
    one; empty without the column. Raises ValueError for anything else."""
    value = record.get("tools")
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if value is None:
        return ()
    if not isinstance(value, (list, tuple, np.ndarray)) or not all(
        isinstance(tool, Mapping) for tool in value
    ):
        raise ValueError(
            f"{where}: 'tools' is {record['tools']!r:.80}, expected a list of JSON schemas for the "
            "chat template; rename the column if it holds something else"
        )
    return tuple(value)


def spellings(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yields a conversation as it is, then in the other forms of the same: arguments of calls as
    an object and as its JSON text, an empty content beside calls as "" and as None, and parts of a
    content as one text. Templates differ in the forms that they take."""
    tried = list[list[Message]]()
    for content, arguments in itertools.product(
        (None, _joined, _empty, _absent), (None, _as_object, _as_text)
    ):
        form = [dict(message) for message in messages]
        for message in form:
            if content is not None:
                content(message)
            if arguments is not None and message.get("tool_calls"):
                message["tool_calls"] = [_called(call, arguments) for call in message["tool_calls"]]
        if form not in tried:
            tried.append(form)
            yield form


def call_arguments(message: Message) -> Iterator[Any]:
    """Yields the arguments of a message's calls."""
    for call in message.get("tool_calls") or ():
        yield call.get("function", call).get("arguments")


def _read_message(value: Any, *, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} is {value!r:.80}, expected an object with role and content")
    message = {key: v for key, v in value.items() if v is not None}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise ValueError(f"{where}: role is {role!r:.80}, expected a text such as 'user'")
    where = f"{where} ({role:.40})"
    if "tool_calls" in message:
        calls = message["tool_calls"] = _read_calls(message["tool_calls"], where=where)
        if not calls:
            del message["tool_calls"]
    said = set(message) - {"role", "content"} - REFERENCES
    if content is None and not (role == "assistant" and said):
        raise ValueError(f"{where}: content is None, expected a text")
    if isinstance(content, (list, tuple, np.ndarray)):
        message["content"] = _read_parts(content, where=where)
    elif content is None:
        message["content"] = None
    elif not isinstance(content, str):
        raise ValueError(f"{where}: content is {content!r:.80}, expected a text or a list of parts")
    return message


def _read_calls(value: Any, *, where: str) -> list[Mapping[str, Any]]:
    calls = list(value) if isinstance(value, (list, tuple, np.ndarray)) else [value]
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{where}: tool_calls holds {call!r:.80}, expected a list of "
                '{"type": "function", "function": {"name": ..., "arguments": ...}}'
            )
    return calls


def _read_parts(value: Iterable[Any], *, where: str) -> str | list[Mapping[str, Any]]:
    """Returns a single part's text, or several parts."""
    parts = list(value)
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"{where}: content holds {part!r:.80}, expected parts "
                '{"type": "text", "text": ...}; models here read text alone'
            )
    return parts[0]["text"] if len(parts) == 1 else parts


def _joined(message: Message) -> None:
    if isinstance(message["content"], list):  # by a line's end, as vLLM's chat endpoint does
        message["content"] = "\n".join(part["text"] for part in message["content"])


def _empty(message: Message) -> None:
    message["content"] = message["content"] or ""


def _absent(message: Message) -> None:
    if message["role"] == "assistant" and len(message) > 2:
        message["content"] = message["content"] or None


def _called(call: Mapping[str, Any], change: Any) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _called(call["function"], change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else {**call}


def _as_object(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _as_text(arguments: Any) -> Any:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)
