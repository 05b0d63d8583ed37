"""A conversation with a call of a tool, as rows of data hold it."""

import copy
from typing import Any

CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tells the time.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
_CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "clock", "arguments": {"city": "Oslo"}},
}
_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Time in Oslo?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "12:30", "tool_call_id": "abcdefghi", "name": "clock"},
    {"role": "assistant", "content": "Half past twelve."},
]


def talk(*, content: Any = "", arguments: Any = None) -> list[dict[str, Any]]:
    """The conversation; with another content beside the call, or other arguments."""
    made = copy.deepcopy(_TALK)
    made[1]["content"] = content
    if arguments is not None:
        made[1]["tool_calls"][0]["function"]["arguments"] = arguments
    return made
