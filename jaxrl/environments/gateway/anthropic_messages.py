"""Anthropic's messages: `POST /v1/messages`."""

import json
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

_ERRORS = {"key": "authentication_error", "model": "not_found_error", "server": "api_error"}
_THOUGHTS = ("thinking", "redacted_thinking")


def _read(body: Body) -> TurnRequest:
    if body.get("thread") is not None:
        raise TurnRefusedError("thread", "thread is not supported; send the whole conversation")
    check_parameters(body, parameters.MESSAGES)
    system = read_text(body.get("system"))
    first = [{"role": "system", "content": system}] if system else []
    return TurnRequest(
        model=body["model"],
        messages=[*first, *(m for given in body["messages"] for m in _messages(given))],
        tools=[_tool(tool) for tool in body.get("tools") or ()],
        max_tokens=most_tokens(body["max_tokens"]),
        stop=stop_texts(body.get("stop_sequences")),
        stream=bool(body.get("stream")),
        calls=(body.get("tool_choice") or {}).get("type") != "none",
        sampling=read_sampling(body),
    )


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = tool.get("type") or "custom"
    refuse(kind != "custom", f"tools of type {kind!r:.40} are not supported")
    return tool_schema(tool["name"], tool.get("description"), tool["input_schema"])


def _messages(given: Message) -> Iterator[Message]:
    """Yields the results of tools in a message, then its text and calls. Thoughts are left out."""
    role, content = given["role"], given["content"]
    refuse(role not in ("user", "assistant"), f"messages of the role {role!r:.40} are unknown")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    blocks = [block for block in blocks if block["type"] not in _THOUGHTS]
    calls, rest = list[Mapping[str, Any]](), list[Any]()
    for block in blocks:
        if block["type"] == "tool_result":
            result = {"role": "tool", "content": read_text(block.get("content"))}
            yield result | {"tool_call_id": block["tool_use_id"]}
        elif block["type"] == "tool_use":
            arguments = json.dumps(block["input"], ensure_ascii=False)
            calls.append(called(block["id"], block["name"], arguments))
        else:
            rest.append(block)
    if rest or calls or role == "assistant":
        message = {"role": role, "content": read_text(rest)}
        yield message | ({"tool_calls": calls} if calls else {})


def _content(answer: TurnAnswer) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": answer.text}] if answer.text or not answer.calls else []
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        for call in answer.calls
    ]
    return [*text, *calls]


def _end(answer: TurnAnswer) -> dict[str, Any]:
    reason = "max_tokens" if answer.truncated else "end_turn"
    if answer.stopped is not None:
        reason = "stop_sequence"
    reason = "tool_use" if answer.calls else reason
    stopped = answer.stopped if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": stopped}


def _whole(request: TurnRequest, answer: TurnAnswer) -> Mapping[str, Any]:
    named = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": request.model}
    usage = {"input_tokens": answer.read, "output_tokens": answer.written}
    return named | {"content": _content(answer), "usage": usage} | _end(answer)


def _stream(request: TurnRequest, answer: TurnAnswer) -> Iterator[bytes]:
    whole = dict(_whole(request, answer))
    content, usage = whole["content"], whole["usage"]
    nothing = {"content": [], "stop_reason": None, "stop_sequence": None}
    begun = whole | nothing | {"usage": usage | {"output_tokens": 0}}

    def tell(kind: str, **more: Any) -> bytes:
        return event({"type": kind} | more, name=kind)

    yield tell("message_start", message=begun)
    for index, block in enumerate(content):
        if block["type"] == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            said = json.dumps(block["input"], ensure_ascii=False)
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": said}
        yield tell("content_block_start", index=index, content_block=block | empty)
        yield tell("content_block_delta", index=index, delta=delta)
        yield tell("content_block_stop", index=index)
    yield tell("message_delta", delta=_end(answer), usage={"output_tokens": answer.written})
    yield tell("message_stop")


def _error(refused: TurnRefusedError) -> Mapping[str, Any]:
    kind = _ERRORS.get(refused.kind, "invalid_request_error")
    error: dict[str, Any] = {"type": kind, "message": str(refused)}
    if refused.kind == "thread":  # official clients then send whole conversations
        error["details"] = {"error_code": "thread_unsupported_request"}
    return {"type": "error", "error": error}


MESSAGES = Dialect(_read, _whole, _stream, _error)
