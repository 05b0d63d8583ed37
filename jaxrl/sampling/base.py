"""What every sampler offers: token ids in, token ids and their log-probs out."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How answers are drawn.

    The logits are divided by the temperature, then truncated by min_p, top_k and top_p, in this
    order, each of which sees what the one before left, renormalised.

    Attributes:
      max_tokens: the longest completion, in tokens.
      temperature: divides the logits; 0 is greedy, whatever the truncation.
      top_p: smallest set of tokens whose probability reaches this is kept; 1 keeps all.
      top_k: this many most probable tokens are kept; 0 keeps all.
      min_p: tokens less probable than this times the largest probability are dropped.
      stop: token sequences that end an answer; a single-token sequence is an EOS token. The
        sequence stays in the completion.
      seed: answers are a function of weights, prompts, params and this number.

    Raises:
      ValueError: for a value out of range; the message names it and the range.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[tuple[int, ...], ...] = ()
    seed: int = 0

    def __post_init__(self):
        ranges = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < math.inf, "finite and at least 0 (greedy)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1 (1 keeps all tokens)"),
            "top_k": (self.top_k >= 0, "at least 0 (0 keeps all tokens)"),
            "min_p": (0 <= self.min_p <= 1, "between 0 (keeps all tokens) and 1"),
            "stop": (all(map(len, self.stop)), "made of sequences of at least one token id"),
            "seed": (0 <= self.seed < 2**63, "at least 0 and below 2**63"),
        }
        for name, (fits, expected) in ranges.items():
            if not fits:
                raise ValueError(f"{name}={getattr(self, name)!r}: it must be {expected}")


class ClosedError(RuntimeError):
    """The sampler was closed while it was sampling."""


class Completion(NamedTuple):
    """One answer.

    Attributes:
      prompt_index: which of the prompts it answers.
      sample_index: which of the prompt's group it is.
      tokens: i32[C] token ids; the stop sequence stays.
      logprobs: f32[C] log-probability of each token under the distribution that it was drawn from,
        after temperature, truncation and renormalisation. A greedy token was drawn from nothing:
        its log-prob is that of temperature 1, as vLLM reports it.
      versions: i32[C] policy version that sampled each token.
      finish_reason: "stop" after a stop sequence, "length" when max_tokens ran out.
      experts: [P + C - 1, L, k], unsigned: where each layer sent the tokens of prompt and answer.
        The last one was drawn and never sent anywhere. None from a sampler that does not record it.
    """

    prompt_index: int
    sample_index: int
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: Literal["stop", "length"]
    experts: np.ndarray | None = None


class Turn(NamedTuple):
    """A sequence that is to go on.

    Attributes:
      context: i32[P] token ids so far.
      prompt_index, sample_index: which answer to which prompt it is; its random numbers depend on
        them, on the seed, and on nothing else.
      max_tokens: the longest continuation.
      opening: tokens of the context with which its whole group began; None for all.
    """

    context: np.ndarray
    prompt_index: int
    sample_index: int
    max_tokens: int
    opening: int | None = None


class Sampler(Protocol):
    """Samples from the policy version that it serves."""

    @property
    def version(self) -> int:
        """The policy version that the next completion is sampled from."""
        ...

    def sample(
        self, prompts: Sequence[np.ndarray], params: SamplingParams, *, group_size: int
    ) -> Iterator[Completion]:
        """Draws `group_size` answers to every prompt, in the order in which they finish. A prompt
        is its token ids, i[P].

        Raises:
          ValueError: for an empty prompt or one too long for the model.
        """
        ...

    def sample_turns(self, turns: Sequence[Turn], params: SamplingParams) -> Iterator[Completion]:
        """Draws one continuation of each sequence, in the order in which they finish. Those of
        whole groups are what `sample` draws; `params.max_tokens` does not count.

        Raises:
          ValueError: as `sample`.
        """
        ...

    def close(self) -> None:
        """Drops what is being sampled: whoever iterates over it, in another thread, gets an error.
        Nothing can be sampled afterwards."""
        ...


def check_request(
    prompts: Sequence[np.ndarray],
    params: SamplingParams,
    *,
    group_size: int,
    max_positions: int,
    vocab_size: int,
) -> None:
    """Refuses what no sampler can answer; a prompt is its token ids, i[P].

    Raises:
      ValueError: for a prompt that is empty, too long or not of the vocabulary, or a group without
        answers; the message says which and what to do.
    """
    if group_size < 1:
        raise ValueError(f"group_size={group_size}: a prompt needs at least 1 answer")
    turns = [Turn(prompt, i, 0, params.max_tokens) for i, prompt in enumerate(prompts)]
    check_turns(turns, max_positions=max_positions, vocab_size=vocab_size)


def check_turns(turns: Sequence[Turn], *, max_positions: int, vocab_size: int) -> None:
    """As `check_request`, of sequences that are to go on."""
    for prompt, i, _, max_tokens, _ in turns:
        if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer) or not len(prompt):
            raise ValueError(
                f"prompt {i} is an array of shape {prompt.shape} and dtype {prompt.dtype}; "
                "expected one dimension of at least one token id"
            )
        if max_tokens < 1:
            raise ValueError(f"prompt {i}: max_tokens={max_tokens}, it must be at least 1")
        if len(prompt) + max_tokens > max_positions:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens, which with max_tokens={max_tokens} "
                f"is more than the model's {max_positions} positions; shorten the prompt or lower "
                "max_tokens"
            )
        if prompt.min() < 0 or prompt.max() >= vocab_size:
            raise ValueError(
                f"prompt {i} has token ids from {prompt.min()} to {prompt.max()}; the model's are "
                f"0 to {vocab_size - 1}: was it made with another tokenizer?"
            )
