"""Texts of a vLLM server's error answers."""

import json

_WRAPPED = "', please check the stack trace above for the root cause"  # by vLLM


def message(text: str) -> str:
    """Returns the message in an answer, without what vLLM wraps around the engine's errors."""
    try:
        error = json.loads(text)["error"]
        found = error if isinstance(error, str) else str(error["message"])
    except (ValueError, LookupError, TypeError):
        return text
    return found.removesuffix(_WRAPPED)


def starting_at(marker: str, text: str) -> str:
    """Drops the server's text before the engine's message."""
    return text[max(0, text.find(marker)) :]
