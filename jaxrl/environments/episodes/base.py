"""The interface of environments, and the limits of an episode."""

from collections.abc import Callable, Mapping, Sequence
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
      after: number of the turn, from 0, that the observation follows, for an episode of several
        sequences; -1 begins a sequence, so that the observation is its prompt. None is the last
        turn.
      max_tokens: limit of the next turn; None leaves those of the episode.
      stop: token ids of the next turn, i32[C] -> the number of them at which it ends, or None; for
        stop texts of its own.
    """

    observation: TokenIds = ()
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = {}
    after: int | None = None
    max_tokens: int | None = None
    stop: Callable[[np.ndarray], int | None] | None = None


class Environment(Protocol):
    """One episode.

    Each episode gets a new instance and a thread with its own event loop, so the methods may block
    and may be `def` or `async def`. A method `close()`, if there is one, is called once after the
    episode, in another thread: a `reset` or `step` that timed out may still run.
    """

    async def reset(self, example: Example) -> TokenIds | Step:
        """Begins the episode and returns the prompt's token ids, usually `example.tokens`, alone or
        as the observation of a step with the limits of the first turn."""
        ...

    async def step(self, completion: np.ndarray) -> Step:
        """Responds to a turn of the policy: i32[C], the sampled token ids. They end with the
        end-of-sequence token unless the turn was truncated."""
        ...


class EpisodeLimits(NamedTuple):
    """Limits of one episode."""

    max_turns: int  # of the policy
    max_tokens: int  # of a sequence after its prompt, observations included
    max_prompt_tokens: int
    timeout: float  # seconds for `reset` and for each `step`
    vocab_size: int  # of the policy; every token id is below it


class EpisodeError(Exception):
    """A failure of the environment, which ends its episode."""

    def __init__(self, end: End, message: str) -> None:
        super().__init__(message)
        self.end: End = end  # "error", "timeout" or "invalid"
