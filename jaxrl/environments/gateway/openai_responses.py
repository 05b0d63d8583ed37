"""OpenAI's responses: `POST /v1/responses`, with the whole conversation in each request."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl.environments.gateway import parameters
from jaxrl.environments.gateway.dialect import (
    Body,
    Dialect,
    Message,
    TurnAnswer,
    TurnRequest,
    called,
    event,
    most_tokens,
    new_id,
    read_sampling,
    read_text,
    refuse,
    tool_schema,
)
from jaxrl.environments.gateway.openai_chat import error
from jaxrl.environments.gateway.parameters import check_parameters

_TEXTS = ("input_text", "output_text", "text")


def _read(body: Body) -> TurnRequest:
    check_parameters(body, parameters.RESPONSES)
    given = body["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    system = body.get("instructions")
    first = [{"role": "system", "content": system}] if system else []
    return TurnRequest(
        model=body["model"],
        messages=[*first, *_messages(items)],
        tools=[_tool(tool) for tool in body.get("tools") or ()],
        max_tokens=most_tokens(body.get("max_output_tokens")),
        stream=bool(body.get("stream")),
        calls=body.get("tool_choice") != "none",
        sampling=read_sampling(body),
    )


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    refuse(tool["type"] != "function", f"tools of type {tool['type']!r} are not supported")
    return tool_schema(tool["name"], tool.get("description"), tool.get("parameters"))


def _messages(items: Sequence[Mapping[str, Any]]) -> Sequence[Message]:
    """Joins the items of a turn, a text and calls, to one message. Thoughts are left out."""
    found = list[dict[str, Any]]()
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            known = role in ("system", "user", "assistant")
            refuse(not known, f"messages of the role {role!r:.40} are not supported")
            found.append({"role": role, "content": read_text(item["content"], kinds=_TEXTS)})
        elif kind == "function_call":
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            call = called(item["call_id"], item["name"], item["arguments"])
            found[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            text = read_text(item["output"], kinds=_TEXTS)
            found.append({"role": "tool", "content": text, "tool_call_id": item["call_id"]})
        else:
            refuse(kind != "reasoning", f"items of type {kind!r:.40} are not supported")
    return found


def _output(answer: TurnAnswer) -> list[dict[str, Any]]:
    items = list[dict[str, Any]]()
    status = "incomplete" if answer.truncated and not answer.calls else "completed"
    if answer.text or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": new_id("msg_"), "role": "assistant"}
        items.append(message | {"status": status, "content": [part]})
    for call in answer.calls:
        named = {"type": "function_call", "id": new_id("fc_"), "call_id": call.id}
        said = {"name": call.name, "arguments": call.arguments, "status": "completed"}
        items.append(named | said)
    return items


def _response(request: TurnRequest) -> dict[str, Any]:
    named = {"id": new_id("resp_"), "object": "response", "created_at": int(time.time())}
    tools = [{"type": "function", "strict": False} | tool["function"] for tool in request.tools]
    return named | {
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": tools,
        "top_p": None,
        "usage": None,
    }


def _finished(response: Mapping[str, Any], answer: TurnAnswer) -> dict[str, Any]:
    cut = answer.truncated and not answer.calls
    usage = {
        "input_tokens": answer.read,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.written,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.read + answer.written,
    }
    return {
        **response,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(answer),
        "usage": usage,
    }


def _whole(request: TurnRequest, answer: TurnAnswer) -> Mapping[str, Any]:
    return _finished(_response(request), answer)


def _stream(request: TurnRequest, answer: TurnAnswer) -> Iterator[bytes]:
    begun, numbers = _response(request), itertools.count()
    finished = _finished(begun, answer)

    def tell(kind: str, **content: Any) -> bytes:
        return event({"type": kind, "sequence_number": next(numbers)} | content, name=kind)

    yield tell("response.created", response=begun)
    yield tell("response.in_progress", response=begun)
    for index, item in enumerate(finished["output"]):
        place = {"item_id": item["id"], "output_index": index}
        empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
        opened = item | {"status": "in_progress"} | empty
        yield tell("response.output_item.added", output_index=index, item=opened)
        if item["type"] == "message":
            (part,) = item["content"]
            place |= {"content_index": 0}
            said, nothing = {"text": part["text"], "logprobs": []}, part | {"text": ""}
            yield tell("response.content_part.added", **place, part=nothing)
            delta = {"delta": part["text"], "logprobs": []}
            yield tell("response.output_text.delta", **place, **delta)
            yield tell("response.output_text.done", **place, **said)
            yield tell("response.content_part.done", **place, part=part)
        else:
            kind, arguments = "response.function_call_arguments", item["arguments"]
            yield tell(f"{kind}.delta", **place, delta=arguments)
            yield tell(f"{kind}.done", **place, name=item["name"], arguments=arguments)
        yield tell("response.output_item.done", output_index=index, item=item)
    yield tell(f"response.{finished['status']}", response=finished)


RESPONSES = Dialect(_read, _whole, _stream, error)
