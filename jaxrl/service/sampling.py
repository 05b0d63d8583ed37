"""Samples and scores for many weights on one base: adapters stay beside the frozen matrices."""

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import Precision, as_served, cast, jit, sampler_precision
from jaxrl.data import Tokenizer
from jaxrl.models import Head, Model, lora, whole_logits
from jaxrl.sampling import Completion, EmbeddedSampler, SamplingParams, StopTexts, Turn
from jaxrl.service.pool import Base, scored
from jaxrl.service.rows import power_of_two
from jaxrl.sharding import Layout

BASE = ""
"""Name of the base model's own weights."""

_KEPT = 8  # weights on the devices; others are read again from their checkpoint


class Request(NamedTuple):
    """A request for samples of one prompt.

    Attributes:
      weights: name of the weights, `BASE` for the base model's.
      prompt: i32[P].
      count: number of samples.
      max_tokens: their maximum length, within the model's positions.
      stop: the ids of tokens that end one, or texts; None for the model's own end tokens.
      seed: samples are a function of weights, prompt, settings and seed.
      prompt_logprobs: whether the prompt's tokens are scored.
      top: number of most probable tokens to name at each position of the prompt.
    """

    weights: str
    prompt: np.ndarray
    count: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[int, ...] | tuple[str, ...] | None
    seed: int
    prompt_logprobs: bool = False
    top: int = 0

    @property
    def settings(self) -> tuple[Any, ...]:
        """The settings that requests of one batch share."""
        return self.weights, self.temperature, self.top_p, self.top_k, self.stop


class Answer(NamedTuple):
    """The samples of a request, and the scores of its prompt.

    Attributes:
      samples: in the order of their indices.
      logprobs: f32[P], NaN at the first token; None if not asked for.
      top: (ids i32[P, k], log-probs f32[P, k]) of the most probable tokens; None if not asked for.
    """

    samples: Sequence[Completion]
    logprobs: np.ndarray | None
    top: tuple[np.ndarray, np.ndarray] | None


class Samplers:
    """The embedded sampler, which serves one set of weights after another."""

    def __init__(
        self,
        base: Base,
        *,
        tokenizer: Tokenizer,
        end_ids: Sequence[int],
        load: Callable[[str], Any],
        max_batch: int,
        layout: Layout | None = None,
    ) -> None:
        """Makes a sampler.

        Args:
          base: the model.
          tokenizer: the model's, for texts that end a sample.
          end_ids: tokens that end a sample if the request names none.
          load: name -> weights, `lora.Adapted` or plain, in `precision.wire`.
          max_batch: the most samples decoded at once.
          layout: the devices of samples, if there are several.
        """
        self._base, self._tokenizer, self._end_ids = base, tokenizer, tuple(end_ids)
        self._load, self._loaded = load, OrderedDict[str, Any]()
        self._texts = functools.lru_cache(maxsize=64)(functools.partial(StopTexts, tokenizer))
        settings: dict[str, Any] = {"precision": base.precision, "max_batch": max_batch}
        model = base.model
        if layout is not None:
            model, settings["layout"] = model._replace(local=layout.local), layout
        self._sampler = EmbeddedSampler(model, base.params, **settings)
        self._serving: Any = base.params
        self._score = jit(
            functools.partial(_score, model=base.model, precision=base.precision),
            static_argnames=("top",),
        )

    def keep(self, name: str, weights: Any) -> None:
        """Keeps weights on the devices, so that the next request need not load them."""
        self._loaded[name] = lora.attach(weights)
        self._loaded.move_to_end(name)
        while len(self._loaded) > _KEPT:
            self._loaded.popitem(last=False)

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """Answers requests with equal `settings`, in one batch. Their seeds must differ."""
        first = requests[0]
        weights = self._weights(first.weights)
        if weights is not self._serving:
            self._sampler.load(weights, version=0)
            self._serving = weights
        turns = [
            Turn(one.prompt, _index(one.seed), sample, one.max_tokens)
            for one in requests
            for sample in range(one.count)
        ]
        params = self._params(first)
        found: dict[int, list[Completion]] = {}
        for completion in self._sampler.sample_turns(turns, params):
            found.setdefault(completion.prompt_index, []).append(completion)
        answers = []
        for one in requests:
            samples = sorted(found[_index(one.seed)], key=lambda c: c.sample_index)
            logprobs, top = None, None
            if one.prompt_logprobs or one.top:
                logprobs, top = self._prompt(weights, one)
            answers.append(Answer(samples, logprobs if one.prompt_logprobs else None, top))
        return answers

    def _weights(self, name: str) -> Any:
        if name == BASE:
            return self._base.params
        if name not in self._loaded:
            self.keep(name, self._load(name))
        self._loaded.move_to_end(name)
        return self._loaded[name]

    def _params(self, request: Request) -> SamplingParams:
        stop, texts = request.stop, None
        ends: tuple[int, ...] = self._end_ids if stop is None else ()
        if stop and isinstance(stop[0], str):
            texts = self._texts(stop)
        elif stop:
            ends = tuple(int(token) for token in stop)
        return SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=max(request.top_k, 0),
            stop=tuple((end,) for end in ends),
            stop_texts=texts,
        )

    def _prompt(self, weights: Any, request: Request) -> tuple[np.ndarray, Any]:
        """Scores the tokens of a prompt, as the sampler computes."""
        size, top = len(request.prompt), request.top
        length = power_of_two(max(size + 1, 64))
        tokens = np.zeros((self._base.layout.count("batch"), length), np.int32)
        tokens[0, :size] = request.prompt
        logprobs, names, values = jax.device_get(
            self._score(weights, tokens, np.int32(size), top=top)
        )
        logprobs = np.concatenate([[np.nan], logprobs[0, : size - 1]]).astype(np.float32)
        if not top:
            return logprobs, None
        # The first token has nothing before it.
        ids = np.concatenate([np.zeros((1, top)), names[0, : size - 1]]).astype(np.int32)
        tops = np.concatenate([np.full((1, top), -99999.0), values[0, : size - 1]])
        return logprobs, (ids, tops.astype(np.float32))


def _score(
    weights: Any,
    tokens: jax.Array,
    size: jax.Array,
    *,
    model: Model,
    precision: Precision,
    top: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes log-probs of the next tokens, f32[B, T], and the `top` most probable ones."""
    served, own = as_served(weights, precision), sampler_precision(precision)
    served = cast(served, own.compute)
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    segments = (index < size).astype(jnp.int32)
    hidden = model.hidden(served, tokens, index, segments, precision=own)
    head = model.gathered_head(served)
    arrays = {"targets": jnp.roll(tokens, -1, axis=1), "mask": index < size - 1}
    logprobs = scored(hidden, head, arrays, precision=own)[:, :, 0]
    if not top:
        return logprobs, tokens, logprobs
    every = jax.lax.map(lambda row: _row_top(row, head, top=top, precision=own), hidden[0][:, None])
    return logprobs, every[0][None], every[1][None]


def _row_top(
    row: jax.Array, head: Head, *, top: int, precision: Precision
) -> tuple[jax.Array, jax.Array]:
    """Finds the most probable next tokens after one position: ids i32[k], log-probs f32[k]."""
    logits = whole_logits(row, head, precision=precision)[0]
    values, ids = jax.lax.top_k(jax.nn.log_softmax(logits), top)
    return ids, values


def _index(seed: int) -> int:
    """Maps a seed to the index that the sampler draws random numbers from."""
    if 0 <= seed < 2**31:
        return seed
    return int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4]) >> 1
