"""Episodes of `verifiers` environments.

An environment of verifiers sends the whole conversation with each request for a turn. The episode
here holds token ids: only the messages after the policy's last turn are rendered and appended. A
request that changes earlier messages fails its episode.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.data.prompts import Example
from jaxrl.environments.connectors.verifiers import Host, Message
from jaxrl.environments.episodes.base import Step
from jaxrl.environments.episodes.chat import Chat
from jaxrl.environments.episodes.tool_chat import ToolChat
from jaxrl.environments.tools.formats import ToolCall


class VerifiersEpisode:
    """An `Environment`: one episode of a task. The column `task` is the task's index."""

    def __init__(self, chat: Chat, host: Host) -> None:
        """Creates one episode."""
        self._chat, self._host = chat, host
        self._name, self._seen, self._numbers = "", list[Message](), itertools.count()
        self._tools: ToolChat | None = None  # None without tools
        self._calls, self._prompt = list[ToolCall](), np.zeros(0, np.int32)

    async def reset(self, example: Example) -> np.ndarray:
        """Returns the task's first request, rendered with its tools, i32[P]; raises ValueError if
        the data has no column `task`, or as `ToolChat`."""
        index = example.row.get("task")
        if not isinstance(index, int):
            raise ValueError(f"the column task is {index!r}; expected the index of a task")
        self._name = self._host.begin()
        told = self._host.ask(self._name, task=index)
        if "messages" not in told:
            raise RuntimeError(f"verifiers: task {index} ended before the policy's first turn")
        self._seen = [_plain(m) for m in told["messages"]]
        if told["tools"]:
            self._tools = ToolChat(self._chat, told["tools"])
        self._prompt = self._chat.encode(self._chat.render(self._seen, tools=told["tools"]))
        return self._prompt

    async def step(self, completion: np.ndarray) -> Step:
        """Answers the environment's request with a turn; raises ValueError if the next request does
        not continue the conversation."""
        told = self._host.ask(self._name, turn=self._turn(completion))
        if "reward" in told:
            return Step((), told["reward"], True, told["metrics"])
        messages, before = [_plain(m) for m in told["messages"]], len(self._seen)
        own = [m["role"] for m in messages[before : before + 1]]
        if messages[:before] != self._seen or own != ["assistant"]:
            raise ValueError(
                "the environment changed earlier messages of the conversation; an episode is one "
                "sequence of tokens, to which messages can only be appended"
            )
        self._seen = messages
        self._prompt = self._answer(messages[before + 1 :], after=completion)
        return Step(self._prompt)

    def _answer(self, messages: Sequence[Message], *, after: np.ndarray) -> np.ndarray:
        if self._tools is None:
            return self._chat.messages(messages, after=after)
        return self._tools.results(messages, calls=self._calls, after=after)

    def close(self) -> None:
        """Abandons the episode if it runs."""
        if self._name:
            self._host.end(self._name)

    def _turn(self, completion: np.ndarray) -> Message:
        """Returns a turn as an assistant's message; well-formed calls become tool calls."""
        self._calls, begin = [], 0
        if self._tools is not None:
            read = self._tools.read(completion, prompt=self._prompt)
            self._calls, begin = [c for c in read.calls if c.error is None], read.begin
        if not self._calls:
            return {"content": self._chat.tokenizer.decode(completion, skip_special_tokens=True)}
        named = [
            {
                "id": f"call_{next(self._numbers)}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for call in self._calls
        ]
        return {"content": self._chat.decode(completion)[:begin], "tool_calls": named}


def _plain(message: Message) -> Message:
    """Returns the role and the text of a message; raises ValueError for other content."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        parts: Sequence[Mapping[str, Any]] = content
        if any(part.get("type") != "text" for part in parts):
            raise ValueError(f"a message has content that is not text: {content!r:.80}")
        content = "".join(part["text"] for part in parts)
    return {"role": message["role"], "content": content}
