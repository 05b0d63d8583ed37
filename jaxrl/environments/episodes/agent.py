"""Tasks that are solved with tools: calls are answered, a turn without one ends the episode."""

from collections.abc import Mapping

import numpy as np

from jaxrl.data.prompts import Example
from jaxrl.environments.episodes.base import Step
from jaxrl.environments.episodes.chat import Chat
from jaxrl.environments.tools.schema import Tool, answer, calls_in


class Agent:
    """An `Environment`. What an answer is worth, reward functions say; they see the last turn."""

    def __init__(
        self, chat: Chat, tools: Mapping[str, Tool], *, call_cost: float, max_characters: int
    ) -> None:
        """One episode.

        Args:
          chat: of the policy.
          tools: by name.
          call_cost: what a call takes from the reward.
          max_characters: of the answer of a tool; the rest is left out.
        """
        self._chat, self._tools = chat, tools
        self._call_cost, self._max_characters = call_cost, max_characters

    async def reset(self, example: Example) -> np.ndarray:
        """The prompt as it was rendered, with the tools' schemas if the template shows them."""
        return example.tokens

    async def step(self, completion: np.ndarray) -> Step:
        """Answers the calls of a turn, one after the other."""
        calls = calls_in(self._chat.text(completion))
        if not calls:
            return Step(done=True, numbers={"tool_calls": 0, "tool_errors": 0})
        found = [await answer(call, self._tools) for call in calls]
        texts = [self._cut(one.text) for one in found]
        return Step(
            self._chat.tool_responses(texts, after=completion),
            reward=-self._call_cost * len(calls),
            numbers={"tool_calls": len(found), "tool_errors": sum(one.failed for one in found)},
        )

    def _cut(self, text: str) -> str:
        rest = len(text) - self._max_characters
        return text if rest <= 0 else f"{text[: self._max_characters]}... ({rest} more characters)"
