"""Environments that answer the policy: what one is, and what an episode with it may take."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxrl.core.batch import End
from jaxrl.data.prompts import Example

Tokens = Sequence[int] | np.ndarray


class Step(NamedTuple):
    """What an environment answers to a turn of the policy.

    Attributes:
      observation: token ids that the policy reads before its next turn, up to where that begins;
        not looked at if `done`.
      reward: for this turn; the rewards of an episode are added up.
      done: whether the episode is over.
      numbers: what is to be counted; added up over the episode, metrics are means over episodes.
    """

    observation: Tokens = ()
    reward: float = 0.0
    done: bool = False
    numbers: Mapping[str, float] = {}


class Environment(Protocol):
    """One episode. It is made anew for each, and called in a thread of its own, always the same,
    with an event loop of its own; `def` serves as well as `async def`."""

    async def reset(self, example: Example) -> Tokens:
        """Begins the episode: token ids of the prompt, usually `example.tokens`."""
        ...

    async def step(self, completion: np.ndarray) -> Step:
        """Takes a turn, i32[C] token ids as they were sampled: the end-of-sequence token stays, and
        a turn that ran out of tokens has none."""
        ...


MakeEnvironment = Callable[[], Environment]


class Limits(NamedTuple):
    """What an episode may take.

    Attributes:
      turns: of the policy.
      tokens: from the end of the prompt, those of observations included.
      prompt_tokens: of the prompt.
      seconds: of `reset` and of each `step`.
      vocab_size: of the policy; an environment's token ids are below it.
    """

    turns: int
    tokens: int
    prompt_tokens: int
    seconds: float
    vocab_size: int


class BrokenError(Exception):
    """An environment has failed.

    Attributes:
      end: how.
    """

    def __init__(self, end: End, message: str) -> None:
        super().__init__(message)
        self.end: End = end
