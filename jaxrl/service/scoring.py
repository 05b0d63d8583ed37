"""Scores of prompts and samples by the service's own devices, as its sampler computes."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core import Precision, as_served, cast, count_bucket, jit, sampler_precision
from jaxrl.models import Head, Model, whole_logits
from jaxrl.service.pool import Base
from jaxrl.service.target_logprobs import target_logprobs

_LOWEST = -99999.0  # stands for no log-prob

Top = tuple[np.ndarray, np.ndarray]
"""Ids i32[P, k] and log-probs f32[P, k] of tokens at each position, of the untempered model."""


class Asked(NamedTuple):
    """Scores that a request asks for, besides the log-probs of a sequence's own tokens.

    Attributes:
      top: number of most probable tokens to name at each position.
      targets: i32[P - 1, K], ids of tokens to score at each position after the first; -1 for none.
      draws: number of tokens to draw at each position after the first.
      temperature: of the draws.
      seed: of the draws.
    """

    top: int = 0
    targets: np.ndarray | None = None
    draws: int = 0
    temperature: float = 1.0
    seed: int = 0

    @property
    def wanted(self) -> bool:
        """True if anything is asked for."""
        return bool(self.top or self.draws or self.targets is not None)


class Scores(NamedTuple):
    """Scores of P tokens; those of the first, which has nothing before it, are NaN or lowest.

    Attributes:
      logprobs: f32[P].
      top: of each position; None if not asked for.
      targets: f32[P - 1, K], log-probs of the targets, 0 where there is none; None without.
      draws: of each position after the first; None if not asked for.
    """

    logprobs: np.ndarray
    top: Top | None
    targets: np.ndarray | None
    draws: Top | None

    def of_last(self, count: int) -> "Scores":
        """Leaves out log-probs and most probable tokens before the last `count` tokens."""
        logprobs, top = self.logprobs.copy(), self.top
        logprobs[:-count] = np.nan
        if top is not None:
            ids, values = (x.copy() for x in top)
            ids[:-count], values[:-count] = 0, _LOWEST
            top = ids, values
        return self._replace(logprobs=logprobs, top=top)


class Scorer:
    """Scores sequences under any weights of a base."""

    def __init__(self, base: Base) -> None:
        """Prepares the program."""
        self._base = base
        self._score = jit(
            functools.partial(_score, model=base.model, precision=base.precision),
            sums=base.precision.sums,
            static_argnames=("top", "draws"),
            out_shardings=base.layout.replicated,
        )

    def score(self, weights: Any, tokens: np.ndarray, asked: Asked) -> Scores:
        """Scores a sequence, i32[P]; `weights` may hold adapters beside their matrices."""
        size, count = len(tokens), self._base.layout.count("batch")
        length = count_bucket(max(size + 1, 64))
        row = np.zeros((count, length), np.int32)
        row[0, :size] = tokens
        targets = None
        if asked.targets is not None:
            targets = np.zeros((length, count_bucket(asked.targets.shape[1])), np.int32)
            targets[: size - 1, : asked.targets.shape[1]] = np.maximum(asked.targets, 0)
        found = jax.device_get(
            self._score(
                weights,
                row,
                np.int32(size),
                targets,
                (np.float32(asked.temperature), np.uint32(asked.seed % 2**32)),
                top=asked.top,
                draws=asked.draws,
            )
        )
        logprobs = np.concatenate([[np.nan], found.logprobs[0, : size - 1]]).astype(np.float32)
        top = named = None
        if found.top is not None:
            ids, values = (np.pad(x[: size - 1], ((1, 0), (0, 0))) for x in found.top)
            values[0] = _LOWEST
            top = ids, values
        if asked.targets is not None:
            values = found.targets[: size - 1, : asked.targets.shape[1]]
            named = np.where(asked.targets < 0, 0, values).astype(np.float32)
        draws = None if found.draws is None else tuple(x[: size - 1] for x in found.draws)
        return Scores(logprobs, top, named, draws)


class _Found(NamedTuple):
    """`Scores` of the next token of each position, padded."""

    logprobs: jax.Array
    top: Any = None
    targets: Any = None
    draws: Any = None


def _score(
    weights: Any,
    tokens: jax.Array,
    size: jax.Array,
    targets: jax.Array | None,
    drawing: tuple[jax.Array, jax.Array],
    *,
    model: Model,
    precision: Precision,
    top: int,
    draws: int,
) -> _Found:
    """Computes log-probs of the next tokens, f32[B, T], and of the first row what is asked for."""
    served, own = as_served(weights, precision), sampler_precision(precision)
    served = cast(served, own.compute)
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    segments = (index < size).astype(jnp.int32)
    hidden = model.hidden(served, tokens, index, segments, precision=own)
    head = model.gathered_head(served)
    arrays = {"targets": jnp.roll(tokens, -1, axis=1), "mask": index < size - 1}
    logprobs = target_logprobs(hidden, head, arrays, precision=own)[:, :, 0]
    if not top and not draws and targets is None:
        return _Found(logprobs)
    temperature, seed = drawing
    keys = jax.random.split(jax.random.key(seed, impl="threefry2x32"), tokens.shape[1])

    def one(inputs: Any) -> Any:
        row, named, key = inputs
        return _position(
            row, head, named, top=top, draws=draws, drawing=(temperature, key), precision=own
        )

    best, ids, drawn = jax.lax.map(one, (hidden[0][:, None], targets, keys))
    return _Found(logprobs, best, ids, drawn)


def _position(
    row: jax.Array,
    head: Head,
    targets: jax.Array | None,
    *,
    top: int,
    draws: int,
    drawing: tuple[jax.Array, jax.Array],
    precision: Precision,
) -> Any:
    """Computes what is asked for about the token after one position, see `Scores`."""
    logits = whole_logits(row, head, precision=precision)[0]
    logprobs = jax.nn.log_softmax(logits)
    best = drawn = None
    if top:
        values, ids = jax.lax.top_k(logprobs, top)
        best = ids, values
    if draws:
        temperature, key = drawing
        sharp = logits / jnp.where(temperature > 0, temperature, 1)
        ids = jax.random.categorical(key, sharp, shape=(draws,))
        ids = jnp.where(temperature > 0, ids, jnp.argmax(logits))
        drawn = ids, logprobs[ids]
    return best, None if targets is None else logprobs[targets], drawn
