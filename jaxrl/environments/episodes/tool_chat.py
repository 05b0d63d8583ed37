"""Tools in a chat: the calls of a turn, and the results that answer them.

The model's chat template decides. It must show the tools, and write a call in a format that is
read: otherwise an episode with tools has none.
"""

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data.messages import spellings
from jaxrl.data.templates import MARK
from jaxrl.environments.episodes.chat import Chat
from jaxrl.environments.tools.formats import FORMATS, CallFormat, Parameters, ToolCall
from jaxrl.environments.tools.reading import Reading, begun_thought, read_calls

Message = Mapping[str, Any]
_USER: Message = {"role": "user", "content": MARK}
_EXAMPLE = ToolCall("example", {"text": "two words", "number": 3, "object": {"key": ["one"]}})
_EXAMPLE_TYPES: Parameters = {
    "text": {"type": "string"},
    "number": {"type": "integer"},
    "object": {"type": "object"},
}


_REMEDY = (
    "choose a model that was trained for tools, or put a template for them into its directory "
    "(chat_template.jinja); docs/agents.md lists the formats"
)
_LONGEST_END = 100  # characters of a template after the last call of a turn


class ToolChat:
    """Reads the calls in turns of the policy, and renders their results."""

    def __init__(self, chat: Chat, schemas: Sequence[Mapping[str, Any]]) -> None:
        """Finds the format of calls by the chat template; `schemas` are those of `Tool`.

        Raises:
          ValueError: if the template does not show the tools, or writes no call that is read back.
        """
        self._chat = chat
        functions = [schema["function"] for schema in schemas]
        self._tools: dict[str, Parameters] = {
            f["name"]: f.get("parameters", {}).get("properties", {}) for f in functions
        }
        self._template = (
            f"the chat template of {getattr(chat.tokenizer, 'name_or_path', '') or 'the model'}"
        )
        self._check_shown(schemas)
        self._format = self._find_format()

    def read(self, completion: np.ndarray, *, prompt: np.ndarray) -> Reading:
        """Returns the calls after the last thought of a turn, i32[C], in its decoded text.

        The prompt, i32[P], is what the policy has read before its turn; it may begin a thought.
        """
        thought = begun_thought(self._chat.decode(prompt[-16:]))
        text = self._chat.decode(completion)
        return read_calls(text, self._format, tools=self._tools, thought=thought)

    def results(
        self, messages: Sequence[Message], *, calls: Sequence[ToolCall], after: np.ndarray
    ) -> np.ndarray:
        """Renders messages with role and content, the results of a turn's calls first, as
        `Chat.messages` does, i32[N]. `after` is the turn, i32[C]."""
        if not calls or not self._answers_shown:
            return self._chat.messages(messages, after=after)
        for called in (calls, calls[:1]):  # some templates refuse several calls in a turn
            with contextlib.suppress(ValueError):
                rest = self._after_calls(called, messages)
                return self._chat.encode(_unsaid(rest, self._chat.decode(after)))
        return self._chat.messages(messages, after=after)

    def _check_shown(self, schemas: Sequence[Mapping[str, Any]]) -> None:
        shown = self._chat.render([_USER], tools=schemas)
        if shown == self._chat.render([_USER]) or any(name not in shown for name in self._tools):
            raise ValueError(
                f"{self._template} does not show the tools {', '.join(self._tools)}: the model "
                f"would not know of them; {_REMEDY}"
            )

    def _find_format(self) -> CallFormat:
        written = ""
        for written in self._rests([_called(_EXAMPLE)]):
            for form in FORMATS.values():
                read = read_calls(written, form, tools={_EXAMPLE.name: _EXAMPLE_TYPES}, most=1)
                if [call._replace(id=None) for call in read.calls] == [_EXAMPLE]:
                    return form
        raise ValueError(
            f"{self._template} does not write an assistant's tool_calls in a format that is read: "
            f"for the call {_EXAMPLE.name}({dict(_EXAMPLE.arguments)}) it writes "
            f"{written!r:.300}; {_REMEDY}"
        )

    @functools.cached_property
    def _answers_shown(self) -> bool:
        """True if the template has a place for results."""
        try:
            return MARK in self._after_calls([_EXAMPLE], [{"role": "tool", "content": MARK}])
        except ValueError:
            return False

    def _after_calls(self, calls: Sequence[ToolCall], messages: Sequence[Message]) -> str:
        """Returns the template's text after the calls, the messages included; raises ValueError if
        the template refuses them."""
        # What the model wrote stays as it is; here names and ids matter.
        known = [
            ToolCall(call.name if call.name in self._tools else "unknown", {}, id=call.id)
            for call in calls
        ]
        said = [dict(m) | {"content": self._chat.escape(m["content"])} for m in messages]
        for number, message in enumerate(m for m in said if m["role"] == "tool"):
            call = known[min(number, len(known) - 1)]
            message |= {"tool_call_id": _call_id(call, number), "name": call.name}
        for rest in self._rests([_called(*known), *said]):
            read = read_calls(rest, self._format, tools={}, most=len(known))
            if len(read.calls) >= len(known):
                return rest[read.end :]
        raise ValueError("the chat template drops calls")

    def _rests(self, messages: Sequence[Message]) -> Iterator[str]:
        """Yields the text from the beginning of the policy's turn after a user's message, for each
        spelling of the messages that the template takes."""
        begun = self._chat.render([_USER]).partition(MARK)[2]
        for spelled in spellings([dict(m) for m in (_USER, *messages)]):
            with contextlib.suppress(ValueError):
                yield self._chat.render(spelled).partition(MARK)[2].removeprefix(begun)


def _called(*calls: ToolCall) -> Message:
    """Returns an assistant's message that calls tools."""
    listed = [
        {
            "id": _call_id(call, number),
            "type": "function",
            "function": {"name": call.name, "arguments": dict(call.arguments)},
        }
        for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": listed}


def _call_id(call: ToolCall, number: int) -> str:
    """Returns the call's id; Mistral's templates demand nine characters."""
    return call.id if call.id and re.fullmatch(r"\w{9}", call.id) else f"call{number:05}"


def _unsaid(rest: str, said: str) -> str:
    """Returns the text without the part of its beginning that a turn has said at its end; the turn
    may lack white space before it."""
    for text in (rest, rest.lstrip()):
        for size in range(min(len(text), len(said), _LONGEST_END), 0, -1):
            if said.endswith(text[:size]):
                return text[size:]
    return rest
