"""The interface of every sampler: token ids in, token ids and their log-probs out."""

import abc
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from jaxrl.core.kept import RECORD, most_kept
from jaxrl.sampling.stop_texts import StopTexts

# What other libraries pass here.
_ELSEWHERE = {
    "n": "pass group_size to `rollouts` or `Sampler.sample`",
    "num_generations": "pass group_size to `rollouts` or `Sampler.sample`",
    "max_new_tokens": "it is max_tokens here",
    "max_completion_length": "it is max_tokens here",
    "stop_token_ids": "it is stop here, a tuple of token sequences",
    "logprobs": "every completion has the log-prob of each of its tokens",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of a request.

    The logits are divided by the temperature. Then min_p, top_k and top_p truncate them in this
    order; each sees the renormalised result of the one before.

    Attributes:
      max_tokens: maximum length of a completion.
      temperature: divides the logits; 0 is greedy and ignores truncation.
      top_p: keeps the smallest set of tokens with at least this probability; 1 keeps all.
      top_k: keeps this many of the most probable tokens; 0 keeps all.
      min_p: drops tokens less probable than this times the largest probability.
      stop: token sequences that end a completion, kept at its end. A sequence of one token is an
        EOS token.
      stop_texts: texts that end a completion at the token that completes one, which is kept.
      seed: completions are a function of weights, prompts, params and seed.

    Raises:
      ValueError: if a value is out of range; the message names the value and the range.
      TypeError: for a setting that it does not have; the message says what to do.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[tuple[int, ...], ...] = ()
    stop_texts: StopTexts | None = None
    seed: int = 0

    def __new__(cls, **settings: Any):
        """Refuses settings that it does not have."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in settings:
            if name not in known:
                hint = _ELSEWHERE.get(name, f"it takes {', '.join(known)}")
                raise TypeError(f"SamplingParams has no setting {name!r}; {hint}")
        return super().__new__(cls)

    @property
    def truncated(self) -> bool:
        """True if top_p, top_k or min_p drops tokens."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def __post_init__(self):
        ranges = {
            "max_tokens": (self.max_tokens >= 1, "at least 1"),
            "temperature": (0 <= self.temperature < math.inf, "finite and at least 0 (greedy)"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1 (1 keeps all tokens)"),
            "top_k": (self.top_k >= 0, "at least 0 (0 keeps all tokens)"),
            "min_p": (0 <= self.min_p <= 1, "between 0 (keeps all tokens) and 1"),
            "stop": (
                all(len(one) and min(one) >= 0 for one in self.stop),
                "made of sequences of at least one token id, none below 0",
            ),
            "seed": (0 <= self.seed < 2**63, "at least 0 and below 2**63"),
        }
        for name, (valid, expected) in ranges.items():
            if not valid:
                raise ValueError(f"{name}={getattr(self, name)!r}: it must be {expected}")


class ClosedError(RuntimeError):
    """The sampler was closed while it was sampling."""


class Completion(NamedTuple):
    """One completion of a prompt.

    Attributes:
      prompt_index: index of the prompt in the request.
      sample_index: index within the prompt's group.
      tokens: i32[C] token ids, with the stop sequence, or the token that completes a stop text.
      logprobs: f32[C] log-probability of each token under the distribution it was drawn from: after
        temperature, truncation and renormalisation. For greedy tokens the log-probability at
        temperature 1, as vLLM reports it.
      versions: i32[C] policy version that sampled each token.
      finish_reason: "stop" after a stop sequence or text, "length" when max_tokens was reached.
      experts: [P + C - 1, L, k] unsigned, the experts that each layer chose for the tokens of
        prompt and completion. The last token was never run through the model. None if the sampler
        does not record experts.
      kept: u8[C, 32], the tokens that truncation kept, see `core.kept`; None if not recorded.
    """

    prompt_index: int
    sample_index: int
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: Literal["stop", "length"]
    experts: np.ndarray | None = None
    kept: np.ndarray | None = None


class TurnCache:
    """Holds the KV cache, if any, that a sampler keeps from an episode's last turn for the next.

    Only the sampler reads and writes the content, which is freed with this object. It changes
    completions only by rounding: matrix products have other sizes.
    """

    def __init__(self) -> None:
        self.content: Any = None


class Turn(NamedTuple):
    """A request to continue one sequence.

    Its random numbers depend on the two indices and the seed alone.
    """

    context: np.ndarray  # i32[P] token ids so far
    prompt_index: int
    sample_index: int
    max_tokens: int  # of the continuation
    prompt_length: int | None = None  # leading tokens that the whole group shares; None for all
    cache: TurnCache | None = None  # of the episode; with None, nothing is kept


class OwnTurn(NamedTuple):
    """A turn, its settings, and the index of its adapters; None for the frozen weights alone."""

    turn: Turn
    params: SamplingParams  # `max_tokens` is ignored
    adapters: int | None = None


class Sampler(Protocol):
    """Samples completions from the policy version that it serves."""

    records_kept: bool = False
    """True if completions of truncated distributions record the tokens that were kept."""

    @property
    def version(self) -> int:
        """The policy version that the next completion is sampled from."""
        ...

    def sample(
        self, prompts: Sequence[np.ndarray], params: SamplingParams, *, group_size: int
    ) -> Iterator[Completion]:
        """Samples `group_size` completions per prompt and yields each as it finishes.

        Args:
          prompts: i[P] token ids each.
          params: the sampling settings.
          group_size: completions per prompt.

        Raises:
          ValueError: at the call, if a prompt is empty, too long for the model or outside its
            vocabulary, or if `group_size` is below 1.
          ClosedError: while iterating, after `close`.
        """
        if group_size < 1:
            raise ValueError(f"group_size={group_size}: a prompt needs at least 1 completion")
        turns = [
            Turn(np.asarray(prompt), i, j, params.max_tokens)
            for i, prompt in enumerate(prompts)
            for j in range(group_size)
        ]
        return self.sample_turns(turns, params)

    @abc.abstractmethod
    def sample_turns(self, turns: Sequence[Turn], params: SamplingParams) -> Iterator[Completion]:
        """Samples one continuation per sequence and yields each as it finishes.

        `params.max_tokens` is ignored; each turn has its own. Raises as `sample`.
        """
        ...

    def close(self) -> None:
        """Aborts sampling: a thread that iterates over completions gets an error. The sampler
        cannot be used afterwards."""


def check_turns(turns: Sequence[Turn], *, max_positions: int, vocab_size: int) -> list[Turn]:
    """Checks that a model can continue the sequences; returns them with arrays as contexts.

    Raises:
      ValueError: if a context is empty, too long or outside the vocabulary; the message names the
        prompt and the fix.
    """
    turns = [turn._replace(context=np.asarray(turn.context)) for turn in turns]
    for prompt, i, _, max_tokens, *_ in turns:
        if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer) or not len(prompt):
            raise ValueError(
                f"prompt {i} is an array of shape {prompt.shape} and dtype {prompt.dtype}; "
                "expected one dimension of at least one token id"
            )
        if max_tokens < 1:
            raise ValueError(f"prompt {i}: max_tokens={max_tokens}; it must be at least 1")
        if len(prompt) + max_tokens > max_positions:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens, with max_tokens={max_tokens} more than the "
                f"model's {max_positions} positions; shorten the prompt or lower max_tokens"
            )
        if prompt.min() < 0 or prompt.max() >= vocab_size:
            raise ValueError(
                f"prompt {i} has token ids from {prompt.min()} to {prompt.max()}; the model's are "
                f"0 to {vocab_size - 1}: use the model's own tokenizer"
            )
    return turns


def check_recorded(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError if truncation may keep more tokens than a record names."""
    most = most_kept(vocab_size)
    if params.truncated and not 0 < params.top_k <= most:
        raise ValueError(
            f"top_k={params.top_k}: the learner normalises over the tokens that truncation keeps, "
            f"and their record of {RECORD} bytes names at most {most} of {vocab_size}; set top_k "
            f"to 1 to {most}"
        )
