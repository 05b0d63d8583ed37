"""The tool agent: runs the policy's tool calls until a turn contains none."""

from collections.abc import Mapping

import numpy as np

from jaxrl.data.prompts import Example
from jaxrl.environments.episodes.base import Step
from jaxrl.environments.episodes.chat import Chat
from jaxrl.environments.tools.schema import Tool, parse_tool_calls, run_tool_call


class Agent:
    """An `Environment` whose observations are tool results. It charges for calls only; reward
    functions score the last turn."""

    def __init__(
        self, chat: Chat, tools: Mapping[str, Tool], *, call_cost: float, max_characters: int
    ) -> None:
        """Creates one episode; `builtin.agent` describes the arguments."""
        self._chat, self._tools = chat, tools
        self._call_cost, self._max_characters = call_cost, max_characters

    async def reset(self, example: Example) -> np.ndarray:
        """Returns the rendered prompt, i32[P], with the tool schemas if the template shows them."""
        return example.tokens

    async def step(self, completion: np.ndarray) -> Step:
        """Runs the tool calls of a turn in order; ends the episode if there are none."""
        calls = parse_tool_calls(self._chat.decode(completion))
        if not calls:
            return Step(done=True, metrics={"tool_calls": 0, "tool_errors": 0})
        results = [await run_tool_call(call, self._tools) for call in calls]
        texts = [self._truncate(result.text) for result in results]
        return Step(
            self._chat.tool_messages(texts, after=completion),
            reward=-self._call_cost * len(calls),
            metrics={"tool_calls": len(calls), "tool_errors": sum(r.failed for r in results)},
        )

    def _truncate(self, text: str) -> str:
        rest = len(text) - self._max_characters
        return text if rest <= 0 else f"{text[: self._max_characters]}... ({rest} more characters)"
