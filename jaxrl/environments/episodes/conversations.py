"""The conversations of an episode, as a tree of token sequences.

Each request holds a whole conversation. The tokens of the turns in it are those that were sampled:
only the messages after the longest known beginning are rendered. A request that continues no known
conversation, because it is the first, or an agent's of its own, or changes earlier messages, begins
a sequence. One that continues a conversation before its end begins a branch.
"""

import bisect
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl.data.ends import turn_end
from jaxrl.data.messages import spellings
from jaxrl.environments.episodes.base import EpisodeLimits, Step
from jaxrl.environments.episodes.chat import Chat
from jaxrl.environments.episodes.tool_chat import ToolChat
from jaxrl.environments.gateway.dialect import (
    Call,
    Message,
    TurnAnswer,
    TurnRefusedError,
    TurnRequest,
    new_id,
    refuse,
)
from jaxrl.environments.tools.formats import ToolCall
from jaxrl.environments.tools.reading import after_thoughts, begun_thought, without_marks


class _Turn(NamedTuple):
    """A turn of the policy."""

    completion: np.ndarray  # i32[C]
    calls: Sequence[ToolCall]
    ids: Sequence[str]  # of the calls
    prompt: int  # tokens of the first prompt of its sequence
    length: int  # tokens of its sequence up to its end


class Place(NamedTuple):
    """The place of a request's turn in the tree.

    Attributes:
      request: asks for the turn.
      known: its conversation.
      after: the turn before it, -1 for none.
      tokens: i32[N], that the policy reads after that turn.
      prompt: tokens of the first prompt of its sequence.
      length: tokens of its sequence before the turn.
    """

    request: TurnRequest
    known: tuple[Any, ...]
    after: int
    tokens: np.ndarray
    prompt: int
    length: int


class Templates:
    """The chat template with the tools of requests; serves all episodes of a run."""

    def __init__(self, chat: Chat) -> None:
        """Prepares the template of a `Chat`."""
        self.chat = chat
        self.with_tools = functools.lru_cache(64)(self._with_tools)
        decode, added = chat.tokenizer.decode, chat.tokenizer.get_added_vocab()
        self.special = [n for n, i in added.items() if not decode([i], skip_special_tokens=True)]
        end = turn_end(chat.tokenizer)
        self.ends = {chat.tokenizer.eos_token_id, *([end.token] if end is not None else ())}

    def _with_tools(self, schemas: str) -> ToolChat:
        return ToolChat(self.chat, json.loads(schemas))


class Conversations:
    """The turns of one episode. Several may be asked for at once; `answer` numbers them."""

    def __init__(self, templates: Templates, limits: EpisodeLimits) -> None:
        """Begins an episode without turns."""
        self._templates, self._chat, self._limits = templates, templates.chat, limits
        self._turns, self._known = list[_Turn](), dict[tuple[Any, ...], int]()

    def place(self, request: TurnRequest) -> Place:
        """Finds the place of a request's turn, which `answer` then adds.

        Raises:
          TurnRefusedError: for a conversation that is too long, ends with the policy's own turn or
            cannot be rendered.
        """
        messages, said = request.messages, _key(request)
        refuse(not messages, "messages is empty; send at least one")
        refuse(
            messages[-1]["role"] == "assistant",
            "the last message is the assistant's; beginning the policy's turn is not supported",
        )
        try:
            place = self._find(request, said)
        except ValueError as error:
            raise TurnRefusedError("invalid", str(error)) from error
        self._check_length(place)
        return place

    def step(self, place: Place) -> Step:
        """Returns the step that asks the policy for a turn."""
        branches, request = place.after != len(self._turns) - 1, place.request
        return Step(
            place.tokens,
            metrics={"branches": float(branches)},
            after=place.after,
            max_tokens=request.max_tokens,
            stop=functools.partial(self._end, request.stop) if request.stop else None,
        )

    def answer(self, place: Place, completion: np.ndarray) -> TurnAnswer:
        """Adds the policy's turn, i32[C], and reads it."""
        request = place.request
        text, tools = self._chat.decode(completion), self._tools(request)
        calls, end = list[ToolCall](), len(text)
        if tools is not None and request.calls:
            read = tools.read(completion, prompt=place.tokens)
            calls = [call for call in read.calls if call.error is None]
            end = read.begin if calls else end
        begun = begun_thought(self._chat.decode(place.tokens[-16:]))
        start = min(after_thoughts(text, thought=begun), end)
        words = self._words(text[start:end])
        stops = [stop for stop in request.stop if stop in words]
        stopped = min(stops, key=words.index, default=None)  # one token may hold several
        if stopped is not None:
            words = words[: words.index(stopped)]
        named = [
            Call(new_id("call_"), _encodable(call.name), _encodable(_json(call.arguments)))
            for call in calls
        ]
        most = min(
            request.max_tokens or self._limits.max_tokens,
            self._limits.max_tokens - (place.length - place.prompt),
        )
        ended = stopped is not None or int(completion[-1]) in self._templates.ends
        ids = [call.id for call in named]
        length = place.length + len(completion)
        spoken = ("assistant", words.strip(), tuple(_call(c.name, c.arguments) for c in named))
        self._known[(*place.known, spoken)] = len(self._turns)
        self._turns.append(_Turn(completion, calls, ids, place.prompt, length))
        return TurnAnswer(
            text=words,
            thought=self._words(without_marks(text[:start])).strip(),
            calls=named,
            truncated=len(completion) >= most and not ended,
            stopped=stopped,
            read=place.length,
            written=len(completion),
        )

    def _find(self, request: TurnRequest, said: tuple[Any, ...]) -> Place:
        messages = request.messages
        for count in range(len(messages) - 1, 0, -1):
            if messages[count]["role"] == "assistant":
                break  # a turn that is not the policy's
            after = self._known.get(said[: count + 1])
            if after is not None:
                turn = self._turns[after]
                tokens = self._continued(request, messages[count:], turn)
                return Place(request, said, after, tokens, turn.prompt, turn.length + len(tokens))
        tokens = self._chat.encode(self._rendered(request))
        return Place(request, said, -1, tokens, len(tokens), len(tokens))

    def _continued(self, request: TurnRequest, rest: Sequence[Message], turn: _Turn) -> np.ndarray:
        """Renders the messages after a turn, i32[N], the results of its calls in their order."""
        order = {identity: place for place, identity in enumerate(turn.ids)}
        plain = [{"role": m["role"], "content": m["content"]} for m in rest]
        known = [order.get(str(m.get("tool_call_id")), len(order)) for m in rest]
        results = [i for i, m in enumerate(rest) if m["role"] == "tool"]
        if results == list(range(len(results))):
            ordered = sorted(results, key=lambda i: known[i])
            plain = [*(plain[i] for i in ordered), *plain[len(results) :]]
        tools = self._tools(request)
        if tools is None:
            return self._chat.messages(plain, after=turn.completion)
        return tools.results(plain, calls=turn.calls, after=turn.completion)

    def _rendered(self, request: TurnRequest) -> str:
        """Renders a whole conversation."""
        self._tools(request)  # refuses tools that the template does not show
        messages = [
            m | {"content": self._chat.escape(m["content"])} if m["role"] == "tool" else dict(m)
            for m in map(dict, request.messages)
        ]
        failed: ValueError | None = None
        for form in spellings(messages):
            try:
                return self._chat.render(form, tools=request.tools)
            except ValueError as error:
                failed = failed or error
        assert failed is not None
        raise failed

    def _tools(self, request: TurnRequest) -> ToolChat | None:
        if not request.tools:
            return None
        return self._templates.with_tools(json.dumps(request.tools, sort_keys=True))

    def _check_length(self, place: Place) -> None:
        limits, own = self._limits, place.length - place.prompt
        if place.prompt > limits.max_prompt_tokens:
            raise TurnRefusedError(
                "length",
                f"the first request of a conversation has {place.prompt} tokens, more than "
                f"data.max_prompt_tokens = {limits.max_prompt_tokens}",
            )
        if own >= limits.max_tokens:
            raise TurnRefusedError(
                "length",
                f"the conversation has {own} tokens after its first request, which leaves no room "
                f"for a turn in sampling.max_tokens = {limits.max_tokens}",
            )

    def _end(self, stops: Sequence[str], completion: np.ndarray) -> int | None:
        """Counts the tokens up to the one that completes a stop text; None without any."""

        def complete(count: int) -> bool:
            text = self._chat.decode(completion[:count])
            return any(stop in text for stop in stops)

        size = len(completion)
        if not complete(size):
            return None
        return bisect.bisect_left(range(size), True, lo=1, key=complete)

    def _words(self, text: str) -> str:
        """Returns what a part of a turn says, without its control tokens."""
        text = text.rpartition("<|message|>")[2]
        for token in self._templates.special:
            text = text.replace(token, "")
        return text


def _key(request: TurnRequest) -> tuple[Any, ...]:
    """Returns a conversation such that equal ones are equal, one entry for the tools and for each
    message. Identities of calls and the white space around an assistant's words do not count."""
    tools = json.dumps(request.tools, sort_keys=True)
    return (tools, *map(_plain, request.messages))


def _plain(message: Message) -> Any:
    role, text = message["role"], message["content"]
    if role != "assistant":
        return role, text
    calls = (_called(call["function"]) for call in message.get("tool_calls") or ())
    return role, text[after_thoughts(text) :].strip(), tuple(calls)


def _called(function: Mapping[str, Any]) -> Any:
    return _call(function["name"], function["arguments"])


def _json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(dict(arguments), ensure_ascii=False)


def _encodable(text: str) -> str:
    """Returns a text in which half of a character, which a model may write as an escape, is "?"."""
    return text.encode(errors="replace").decode()


def _call(name: str, arguments: Any) -> Any:
    """Returns a call such that equal arguments in another order or spelling are equal."""
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        given = arguments
    return name, json.dumps(given, sort_keys=True)
