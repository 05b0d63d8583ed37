"""Text games with Gymnasium's interface: an object with `reset()` and `step(text)`."""

from typing import Any

import numpy as np

from jaxrl.data.prompts import Example
from jaxrl.environments.episodes.base import Step
from jaxrl.environments.episodes.chat import Chat

_PLACEHOLDER = "{observation}"


class TextGame:
    """An `Environment` whose observations are user messages from a game."""

    def __init__(self, chat: Chat, game: Any) -> None:
        """Creates one episode.

        The game's `reset` returns a text, or a text and an info. `step` takes the policy's text and
        returns (text, reward, done, info), or (text, reward, terminated, truncated, info). The
        entry `metrics` of an info is a mapping of numbers for the step.
        """
        self._chat, self._game = chat, game

    async def reset(self, example: Example) -> np.ndarray:
        """Returns the prompt, i32[P], with the game's first observation for {observation}; raises
        ValueError if the prompt has no {observation}.

        The game's `reset` gets the arguments in the column `reset`, and the column `seed`, if the
        data has them.
        """
        prompt = example["rendered_prompt"]
        if _PLACEHOLDER not in prompt:
            raise ValueError(f"the prompt {prompt!r:.80} has no {_PLACEHOLDER}")
        arguments = dict(example.row.get("reset") or {})
        if (seed := example.row.get("seed")) is not None:
            arguments["seed"] = seed
        returned = self._game.reset(**arguments)
        observation = returned[0] if isinstance(returned, tuple) else returned
        text = prompt.replace(_PLACEHOLDER, self._chat.escape(str(observation)))
        # Without the chat template, the tokenizer's own tokens stand in front of the prompt.
        start = len(example.tokens) - len(self._chat.encode(prompt))
        return np.concatenate([example.tokens[:start], self._chat.encode(text)])

    async def step(self, completion: np.ndarray) -> Step:
        """Passes the turn to the game as text, stripped and without control tokens; raises
        ValueError if the game returns neither 4 nor 5 values."""
        text = self._chat.tokenizer.decode(completion, skip_special_tokens=True).strip()
        returned = self._game.step(text)
        if len(returned) not in (4, 5):
            raise ValueError(f"step returned {len(returned)} values, expected 4 or 5")
        observation, reward, *ends, info = returned
        metrics = (info or {}).get("metrics", {})
        if any(map(bool, ends)):
            return Step((), reward, True, metrics)
        observed = self._chat.user_message(str(observation), after=completion)
        return Step(observed, reward, metrics=metrics)

    def close(self) -> None:
        """Closes the game if it has a `close`, as Gymnasium's games do."""
        if (close := getattr(self._game, "close", None)) is not None:
            close()
