"""The common form of requests for a turn and of answers, between the dialects of the endpoint."""

import json
import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

Body = Mapping[str, Any]
Message = Mapping[str, Any]
"""A message of a chat template: role, content, and maybe tool_calls or tool_call_id."""

Kind = Literal["key", "model", "length", "thread", "invalid", "ended", "server"]

STATUS: Mapping[Kind, int] = {
    "key": 401,
    "model": 404,
    "length": 400,
    "thread": 400,
    "invalid": 400,
    "ended": 410,  # not one that clients repeat
    "server": 500,
}


class TurnRefusedError(Exception):
    """A request that gets no turn; each dialect has its own form of it."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind: Kind = kind


class SamplingRequest(NamedTuple):
    """Settings of sampling that a request names for its turn; None for those it leaves out."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


class TurnRequest(NamedTuple):
    """A request for a turn of the policy."""

    model: str
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas, as chat completions have them
    max_tokens: int | None = None  # of the turn
    stop: tuple[str, ...] = ()
    stream: bool = False
    calls: bool = True  # False if the turn is text in any case
    counts: bool = True  # True if a stream ends with the numbers of tokens
    sampling: SamplingRequest = SamplingRequest()


class Call(NamedTuple):
    """A call of a tool in an answer."""

    id: str
    name: str
    arguments: str  # JSON


class TurnAnswer(NamedTuple):
    """A turn of the policy."""

    text: str  # after its thoughts, up to its calls or a stop text
    thought: str
    calls: Sequence[Call]
    truncated: bool  # it ended at a limit of tokens
    stopped: str | None  # the stop text that ended it
    read: int  # tokens before it
    written: int  # its own


class Dialect(NamedTuple):
    """One API: its JSON in and out."""

    read: Callable[[Body], TurnRequest]  # raises TurnRefusedError
    whole: Callable[[TurnRequest, TurnAnswer], Mapping[str, Any]]
    stream: Callable[[TurnRequest, TurnAnswer], Iterator[bytes]]
    error: Callable[[TurnRefusedError], Mapping[str, Any]]


def event(content: Mapping[str, Any], *, name: str | None = None) -> bytes:
    """Encodes a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content)}\n\n".encode()


def new_id(prefix: str) -> str:
    """Returns a name that no other answer has."""
    return prefix + uuid.uuid4().hex[:24]


def refuse(wrong: bool, message: str) -> None:
    """Raises TurnRefusedError for an invalid request if `wrong`."""
    if wrong:
        raise TurnRefusedError("invalid", message)


def read_text(content: Any, *, kinds: Sequence[str] = ("text",)) -> str:
    """Returns the text of a message's content, a text or parts.

    Raises:
      TurnRefusedError: for parts of another kind, such as images.
    """
    if content is None or isinstance(content, str):
        return content or ""
    refuse(not isinstance(content, list), f"content {content!r:.80} is neither a text nor parts")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        known = kind in kinds and isinstance(part.get("text"), str)
        refuse(not known, f"content of type {kind!r:.40} is not supported; the policy reads text")
    return "".join(part["text"] for part in content)


def tool_schema(name: Any, description: Any, parameters: Any) -> Mapping[str, Any]:
    """Returns a tool as chat completions describe it."""
    refuse(not isinstance(name, str), f"a tool has the name {name!r:.80}; expected a text")
    function = {"name": name, "description": description or "", "parameters": parameters or {}}
    return {"type": "function", "function": function}


def called(identity: Any, name: str, arguments: str) -> Mapping[str, Any]:
    """Returns a call as a message of a chat template holds it."""
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def stop_texts(given: Any) -> tuple[str, ...]:
    """Reads stop sequences: none, a text or a list of texts."""
    texts = [given] if isinstance(given, str) else list(given or ())
    wrong = not all(isinstance(text, str) and text for text in texts)
    refuse(wrong, f"stop is {given!r:.80}; expected texts")
    return tuple(texts)


def most_tokens(given: Any) -> int | None:
    """Reads a limit of tokens."""
    wrong = given is not None and (not isinstance(given, int) or given < 1)
    refuse(wrong, f"the limit of tokens is {given!r:.80}; expected an integer of at least 1")
    return given


def read_sampling(body: Body) -> SamplingRequest:
    """Reads the settings of sampling.

    Raises:
      TurnRefusedError: for one that is no number, or out of its range.
    """
    for name, valid, expected in (
        ("temperature", lambda x: 0 <= x < math.inf, "a finite number of at least 0"),
        ("top_p", lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
        ("top_k", lambda x: type(x) is int and x >= -1, "at least 1, or -1 or 0 for no limit"),
        ("seed", lambda x: type(x) is int, "an integer"),
    ):
        value = body.get(name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        wrong = value is not None and not (number and valid(value))
        refuse(wrong, f"{name} = {value!r:.80}: it must be {expected}")
    return SamplingRequest(*(body.get(name) for name in SamplingRequest._fields))
