"""OpenAI's chat completions: `POST /v1/chat/completions`."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl.environments.gateway import parameters
from jaxrl.environments.gateway.dialect import (
    Body,
    Dialect,
    Message,
    TurnAnswer,
    TurnRefusedError,
    TurnRequest,
    called,
    event,
    most_tokens,
    new_id,
    read_sampling,
    read_text,
    refuse,
    stop_texts,
    tool_schema,
)
from jaxrl.environments.gateway.parameters import check_parameters

_ROLES = {"developer": "system"}
_CODES = {"key": "invalid_api_key", "model": "model_not_found", "length": "context_length_exceeded"}


def _read(body: Body) -> TurnRequest:
    check_parameters(body, parameters.CHAT)
    tools = [_tool(tool) for tool in body.get("tools") or ()]
    return TurnRequest(
        model=body["model"],
        messages=[_message(m) for m in body["messages"]],
        tools=tools,
        max_tokens=most_tokens(body.get("max_completion_tokens") or body.get("max_tokens")),
        stop=stop_texts(body.get("stop")),
        stream=bool(body.get("stream")),
        calls=body.get("tool_choice") != "none",
        counts=bool((body.get("stream_options") or {}).get("include_usage")),
        sampling=read_sampling(body),
    )


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    refuse(tool["type"] != "function", f"tools of type {tool['type']!r} are not supported")
    f = tool["function"]
    return tool_schema(f["name"], f.get("description"), f.get("parameters"))


def _message(given: Message) -> Message:
    role = _ROLES.get(given["role"], given["role"])
    known = role in ("system", "user", "assistant", "tool")
    refuse(not known, f"messages of the role {role!r:.40} are not supported")
    message: dict[str, Any] = {"role": role, "content": read_text(given.get("content"))}
    if role == "assistant" and (calls := given.get("tool_calls")):
        message["tool_calls"] = [
            called(call.get("id"), call["function"]["name"], call["function"]["arguments"])
            for call in calls
        ]
    if role == "tool":
        message["tool_call_id"] = given.get("tool_call_id")
    return message


def _message_of(answer: TurnAnswer) -> dict[str, Any]:
    calls = [called(*call) for call in answer.calls]
    content = answer.text or (None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if answer.thought:
        message["reasoning_content"] = answer.thought
    return message | ({"tool_calls": calls} if calls else {})


def _reason(answer: TurnAnswer) -> str:
    return "tool_calls" if answer.calls else "length" if answer.truncated else "stop"


def _usage(answer: TurnAnswer) -> Mapping[str, int]:
    total = answer.read + answer.written
    counts = {"prompt_tokens": answer.read, "completion_tokens": answer.written}
    return counts | {"total_tokens": total}


def _shared(request: TurnRequest, kind: str) -> dict[str, Any]:
    created = int(time.time())
    return {"id": new_id("chatcmpl-"), "object": kind, "created": created, "model": request.model}


def _whole(request: TurnRequest, answer: TurnAnswer) -> Mapping[str, Any]:
    message = _message_of(answer) | {"refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _reason(answer)}
    return _shared(request, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}


def _stream(request: TurnRequest, answer: TurnAnswer) -> Iterator[bytes]:
    shared, delta = _shared(request, "chat.completion.chunk"), _message_of(answer)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(delta["tool_calls"])]
    for part, reason in ((delta, None), ({}, _reason(answer))):
        choice = {"index": 0, "delta": part, "logprobs": None, "finish_reason": reason}
        yield event(shared | {"choices": [choice]})
    if request.counts:
        yield event(shared | {"choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def error(refused: TurnRefusedError) -> Mapping[str, Any]:
    """Returns a refusal in OpenAI's form."""
    kind = "server_error" if refused.kind == "server" else "invalid_request_error"
    described = {"message": str(refused), "type": kind, "param": None}
    return {"error": described | {"code": _CODES.get(refused.kind)}}


CHAT = Dialect(_read, _whole, _stream, error)
