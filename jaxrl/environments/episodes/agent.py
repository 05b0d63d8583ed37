"""The tool agent: runs the policy's tool calls until a turn contains none."""

from collections.abc import Mapping

import numpy as np

from jaxrl.data.prompts import Example
from jaxrl.environments.episodes.base import Step
from jaxrl.environments.episodes.tool_chat import ToolChat
from jaxrl.environments.tools.schema import Tool, run_tool_call


class Agent:
    """An `Environment` whose observations are tool results. It charges for calls only; reward
    functions score the last turn."""

    def __init__(
        self, chat: ToolChat, tools: Mapping[str, Tool], *, call_cost: float, max_characters: int
    ) -> None:
        """Creates one episode; `builtin.agent` describes the arguments."""
        self._chat, self._tools = chat, tools
        self._prompt = np.zeros(0, np.int32)  # what the policy has read last
        self._call_cost, self._max_characters = call_cost, max_characters

    async def reset(self, example: Example) -> np.ndarray:
        """Returns the rendered prompt, i32[P], which shows the tools."""
        self._prompt = example.tokens
        return self._prompt

    async def step(self, completion: np.ndarray) -> Step:
        """Runs the tool calls of a turn in order; ends the episode if there are none."""
        calls = self._chat.read(completion, prompt=self._prompt).calls
        if not calls:
            return Step(done=True, metrics={"tool_calls": 0, "tool_errors": 0})
        results = [await run_tool_call(call, self._tools) for call in calls]
        messages = [{"role": "tool", "content": self._truncate(r.text)} for r in results]
        self._prompt = self._chat.results(messages, calls=calls, after=completion)
        return Step(
            self._prompt,
            reward=-self._call_cost * len(calls),
            metrics={"tool_calls": len(calls), "tool_errors": sum(r.failed for r in results)},
        )

    def _truncate(self, text: str) -> str:
        rest = len(text) - self._max_characters
        return text if rest <= 0 else f"{text[: self._max_characters]}... ({rest} more characters)"
