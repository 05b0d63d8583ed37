"""Reading of the calls in a turn, after its thoughts.

Servers drop thoughts before they look for calls; so does this.
"""

import json
import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxrl.environments.tools.formats import CallFormat, Parameters, ToolCall, Written

THOUGHTS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|channel|>analysis<|message|>": "<|end|>",
}
"""Marks around thoughts, of all models."""

# A thought that the prompt begins has an end alone. <|end|> ends other things too.
_ENDS = "|".join(re.escape(end) for end in THOUGHTS.values() if end != "<|end|>")
_STARTS = "|".join(map(re.escape, THOUGHTS))


def begun_thought(before: str) -> str:
    """Returns the end of the thought that a prompt has begun, "" if it has begun none."""
    before = before.rstrip()
    return next((end for start, end in THOUGHTS.items() if before.endswith(start)), "")


def after_thoughts(text: str, *, thought: str = "") -> int:
    """Returns the place after the last thought of a turn; its end if a thought is not closed.
    `thought` is the end of a thought that the prompt has begun."""
    start = text.find(thought) + len(thought)
    if start < len(thought):
        return len(text)
    for match in re.finditer(f"(?P<thought>{_STARTS})|(?P<over>{_ENDS})", text):
        if match.start() < start:
            continue
        start = match.end()
        if match["thought"]:
            mark = THOUGHTS[match["thought"]]
            start = text.find(mark, start) + len(mark)
            if start < len(mark):
                return len(text)
    return start


def without_marks(text: str) -> str:
    """Returns thoughts without the marks around them."""
    for mark in (*THOUGHTS, *THOUGHTS.values()):
        text = text.replace(mark, "")
    return text


class Reading(NamedTuple):
    """The calls of a turn, and their place in its text."""

    calls: list[ToolCall]
    begin: int = 0
    end: int = 0


def read_calls(
    text: str,
    form: CallFormat,
    *,
    tools: Mapping[str, Parameters],
    thought: str = "",
    most: int | None = None,
) -> Reading:
    """Reads the calls after the last thought of a turn, malformed ones included.

    Nothing stands after an unclosed thought. `tools` gives types to arguments that a format writes
    as bare text. `thought` is the end of a thought that the prompt has begun. Reading stops after
    `most` calls.
    """
    marks = re.compile(f"(?P<thought>{_STARTS})|(?P<over>{_ENDS})|(?P<call>{form.begin})")
    start = text.find(thought) + len(thought)  # of what stands after the last thought
    if start < len(thought):
        return Reading([])
    position, calls, begin, last = start, list[ToolCall](), 0, 0
    while most is None or len(calls) < most:
        match = marks.search(text[start:], position - start)
        if not match:
            break
        position = start + match.end()
        if match["call"] is None:
            if match["thought"]:
                mark = THOUGHTS[match["thought"]]
                position = text.find(mark, position) + len(mark)
                if position < len(mark):
                    return Reading([])
            calls, start = [], position
            continue
        found, end = _read(text, position, form=form, opening=match, tools=tools)
        if any(call.error for call in found) and re.search(_ENDS, text[position:end]):
            continue  # the mark stands in a thought whose beginning is not in the text
        begin = begin if calls else start + match.start()
        calls, position, last = [*calls, *found], max(end, position), end
    return Reading(calls, begin, last) if calls else Reading([])


def _read(
    text: str,
    position: int,
    *,
    form: CallFormat,
    opening: re.Match[str],
    tools: Mapping[str, Parameters],
) -> tuple[list[ToolCall], int]:
    """Returns the calls of one pair of marks, and the end of the second mark."""
    closing = re.compile(form.end).search(text, position)
    if not closing:
        return [ToolCall("", {}, f"the call does not end with {form.end}")], len(text)
    body = text[position : closing.start()]
    try:
        calls = list(form.read(Written(body, opening, tools)))
        for call in calls:  # JSON has no infinite numbers, nor the answers that hold calls
            json.dumps(dict(call.arguments), allow_nan=False)
    except (json.JSONDecodeError, RecursionError) as error:
        calls = [ToolCall("", {}, f"the call is not JSON: {error}")]
    except (ValueError, SyntaxError, MemoryError):
        calls = [ToolCall("", {}, f"a call is {form.example}")]
    return calls, closing.end()
