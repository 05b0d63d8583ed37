"""The interface of environments, and the limits of an episode."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxrl.core.batch import End
from jaxrl.data.prompts import Example

TokenIds = Sequence[int] | np.ndarray


class Step(NamedTuple):
    """The environment's response to one turn of the policy.

    Attributes:
      observation: token ids that the policy reads before its next turn, up to the beginning of that
        turn; ignored if `done`.
      reward: for this turn; an episode earns the sum over its turns.
      done: True at the end of the episode.
      metrics: summed over the episode, then averaged over episodes.
    """

    observation: TokenIds = ()
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = {}


class Environment(Protocol):
    """One episode.

    Each episode gets a new instance and a thread with its own event loop, so the methods may block
    and may be `def` or `async def`. A method `close()`, if there is one, is called once after the
    episode, in another thread: a `reset` or `step` that timed out may still run.
    """

    async def reset(self, example: Example) -> TokenIds:
        """Begins the episode and returns the prompt's token ids, usually `example.tokens`."""
        ...

    async def step(self, completion: np.ndarray) -> Step:
        """Responds to a turn of the policy: i32[C], the sampled token ids. They end with the
        end-of-sequence token unless the turn was truncated."""
        ...


class EpisodeLimits(NamedTuple):
    """Limits of one episode."""

    max_turns: int  # of the policy
    max_tokens: int  # after the prompt, observations included
    max_prompt_tokens: int
    timeout: float  # seconds for `reset` and for each `step`
    vocab_size: int  # of the policy; every token id is below it


class EpisodeError(Exception):
    """A failure of the environment, which ends its episode."""

    def __init__(self, end: End, message: str) -> None:
        super().__init__(message)
        self.end: End = end  # "error", "timeout" or "invalid"
