"""A request to the embedded sampler, and its completions in progress."""

import threading
from typing import NamedTuple

import jax
import numpy as np

from jaxrl.core.buckets import row_multiple
from jaxrl.core.precision import Precision
from jaxrl.models.model import Model
from jaxrl.models.spec import Params
from jaxrl.sampling.base import Completion, SamplingParams, Turn
from jaxrl.sampling.embedded.decode_steps import Segment
from jaxrl.sampling.embedded.draw_token import Drawn, DrawSettings, draw_settings
from jaxrl.sampling.embedded.own_turns import OwnTurns
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.transfer import place


class DecodeRequest(NamedTuple):
    """Weights and settings that all batches of a request share."""

    weights: Params
    version: int
    params: SamplingParams
    model: Model
    precision: Precision
    layout: Layout | None
    max_batch: int
    closed: threading.Event
    record_experts: bool
    record_kept: bool
    own: OwnTurns | None = None  # settings of each turn, whose prompt index is its number in them

    @property
    def settings(self) -> DrawSettings:
        """The settings of drawing a token."""
        if self.own is not None:
            return self.own.settings
        return draw_settings(self.params, record_kept=self.record_kept)

    @property
    def shards(self) -> int:
        """Number of which the rows of a batch are a multiple, see `buckets.row_multiple`."""
        parts = 1 if self.layout is None else self.layout.count("batch")
        return row_multiple(parts, precision=self.precision)

    @property
    def on_cpu(self) -> bool:
        """True if the weights are on a CPU."""
        return next(iter(jax.tree.leaves(self.weights)[0].devices())).platform == "cpu"

    @property
    def key(self) -> jax.Array:
        """The key of all random numbers, key[]."""
        seed = self.params.seed
        return jax.random.fold_in(jax.random.key(seed % 2**32, impl="threefry2x32"), seed // 2**32)

    def put(self, rows: np.ndarray) -> jax.Array | np.ndarray:
        """Places an array [B, ...] with one row per prompt or completion on the devices."""
        return rows if self.layout is None else place(rows, self.layout.batch(("batch",)))


class PartialCompletion:
    """The tokens of one completion so far."""

    def __init__(self, turn: Turn):
        self.turn = turn
        self._drawn: list[Drawn] = []
        self._length = 0

    @property
    def position(self) -> int:
        """Position of the last token, hence its slot."""
        return len(self.turn.context) + self._length - 1

    @property
    def full(self) -> bool:
        """True once it has as many tokens as its turn allows."""
        return self._length == self.turn.max_tokens

    def append(self, segment: Segment, *, row: int, length: int) -> None:
        """Takes the new tokens of a row whose completion now has `length` tokens."""
        new = slice(length - self._length)
        self._drawn.append(jax.tree.map(lambda x: np.asarray(x)[new, row], segment.drawn))
        self._length = length

    def finish(self, *, stopped: bool, version: int, experts: np.ndarray | None) -> Completion:
        """Returns the completion; `experts` are its row's, from the context's first token.

        Raises:
          FloatingPointError: if a log-prob is not finite.
        """
        prompt, sample = self.turn.prompt_index, self.turn.sample_index
        drawn = jax.tree.map(lambda *parts: np.concatenate(parts), *self._drawn)
        logprobs = drawn.logprobs
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(
                f"policy version {version} gives logits that are not finite at token "
                f"{np.argmin(np.isfinite(logprobs))} of completion {sample} of prompt {prompt}: "
                "the weights hold NaN or infinity, or the sampler's dtype overflows (f16 ends at "
                "65504; try sampler=bf16 in precision)"
            )
        return Completion(
            prompt_index=prompt,
            sample_index=sample,
            tokens=drawn.tokens,
            logprobs=logprobs,
            versions=np.full(len(logprobs), version, np.int32),
            finish_reason="stop" if stopped else "length",
            experts=None if experts is None else experts[: self.position].copy(),
            kept=drawn.kept,
        )
