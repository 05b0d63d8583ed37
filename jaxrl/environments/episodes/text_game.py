"""Games told in words, with Gymnasium's interface: an object with `reset()` and `step(text)`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl.data.prompts import Example, Tokenizer
from jaxrl.environments.episodes.base import Step
from jaxrl.environments.episodes.chat import Chat

PLACE = "{observation}"


class TextGame:
    """An `Environment`: what the game says are messages of the user."""

    def __init__(self, make: Callable[[], Any], *, chat: Chat, tokenizer: Tokenizer) -> None:
        """One episode.

        Args:
          make: () -> the game. `reset` returns a text, or a text and an info; `step` takes what the
            policy said and returns (text, reward, done, info), or (text, reward, terminated,
            truncated, info).
          chat: of the policy.
          tokenizer: the policy's.
        """
        self._game, self._chat, self._tokenizer = make(), chat, tokenizer

    async def reset(self, example: Example) -> np.ndarray:
        """Begins the game, with the column `seed` of the data if there is one. The prompt is that
        of the data, with what the game says first in the place of {observation}.

        Raises:
          ValueError: if the prompt does not say where that belongs.
        """
        prompt = example.record["prompt"]
        if PLACE not in prompt:
            raise ValueError(f"the prompt {prompt!r:.80} does not say where {PLACE} belongs")
        seed = example.row.get("seed")
        found = self._game.reset() if seed is None else self._game.reset(seed=seed)
        said = found[0] if isinstance(found, tuple) else found
        text = prompt.replace(PLACE, self._chat.harmless(str(said)))
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)

    async def step(self, completion: np.ndarray) -> Step:
        """Plays the turn as text, without control tokens and white space around it.

        Raises:
          ValueError: if the game answers with another number of things.
        """
        text = self._tokenizer.decode(completion, skip_special_tokens=True).strip()
        found = self._game.step(text)
        if len(found) not in (4, 5):
            raise ValueError(f"step returned {len(found)} things, expected 4 or 5")
        said, reward, *ends = found[:-1]
        done = any(map(bool, ends))
        return Step(() if done else self._chat.user(str(said), after=completion), reward, done)
