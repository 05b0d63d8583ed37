"""What every sampler offers: token ids in, token ids and their log-probs out."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How answers are drawn.

    Attributes:
      max_tokens: the longest completion, in tokens.
      temperature: divides the logits; 0 is greedy.
      top_p: smallest set of tokens whose probability reaches this is kept; 1 keeps all.
      top_k: this many most probable tokens are kept; 0 keeps all.
      min_p: tokens less probable than this times the largest probability are dropped.
      stop: token sequences that end an answer; a single-token sequence is an EOS token. The
        sequence stays in the completion.
      seed: answers are a function of weights, prompts, params and this number.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[tuple[int, ...], ...] = ()
    seed: int = 0


class Completion(NamedTuple):
    """One answer.

    Attributes:
      prompt_index: which of the prompts it answers.
      sample_index: which of the prompt's group it is.
      tokens: i32[C] token ids; the stop sequence stays.
      logprobs: f32[C] log-probability of each token under the distribution that it was drawn from,
        after temperature and truncation.
      versions: i32[C] policy version that sampled each token.
      finish_reason: "stop" after a stop sequence, "length" when max_tokens ran out.
    """

    prompt_index: int
    sample_index: int
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: Literal["stop", "length"]


class Sampler(Protocol):
    """Samples from the policy version that it serves."""

    @property
    def version(self) -> int:
        """The policy version that the next completion is sampled from."""
        ...

    def sample(
        self, prompts: Sequence[np.ndarray], params: SamplingParams, *, group_size: int
    ) -> Iterator[Completion]:
        """Draws `group_size` answers to every prompt, in the order in which they finish.

        Raises:
          ValueError: for an empty prompt or one too long for the model.
        """
        ...
