"""Sampling with JAX on the learner's own arrays: the default sampler, without a server."""

import functools
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrl.core.precision import Precision, as_served, sampler_precision
from jaxrl.models.decoder import Model
from jaxrl.models.spec import Params
from jaxrl.sampling.base import Completion, SamplingParams, Turn, check_request, check_turns
from jaxrl.sampling.embedded.batch_decoding import Request, run_batch
from sharding.partition import Layout


class _Weights(NamedTuple):
    params: Params
    version: int


class EmbeddedSampler:
    """Draws answers by decoding with a key-value cache; a `Sampler`.

    An answer is a function of the weights, its prompt, the prompt's and the answer's index, the
    sampling params and the seed. The other prompts of the request change it by no more than the
    rounding of matrix products of another size.

    One program is compiled per power-of-two number of prompts or answers and per bucket of lengths.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        *,
        precision: Precision,
        version: int = 0,
        max_batch: int = 64,
        layout: Layout | None = None,
        record_experts: bool = False,
    ):
        """Makes a sampler that serves `params`.

        Args:
          model: the decoder.
          params: the learner's weights, in any dtype.
          precision: the run's policy; the sampler follows `sampler_precision` of it.
          version: the policy version of `params`.
          max_batch: the most answers decoded at once. More use the machine better, and each takes
            the cache of its own tokens: 2 * layers * kv heads * head_dim numbers per token.
          layout: how the sampler's copy of the weights and its batches lie on a mesh; None leaves
            the weights where they are.
          record_experts: whether completions say where the layers sent their tokens.

        Raises:
          ValueError: if `max_batch` is not positive, or there are no experts to record.
        """
        if record_experts and model.config.experts is None:
            raise ValueError("record_experts=True: the model is dense, it has no experts to record")
        if max_batch < 1:
            raise ValueError(f"max_batch={max_batch}: at least 1 answer must fit a batch")
        self._model = model
        self._policy = precision
        self._precision = sampler_precision(precision)
        self._max_batch = max_batch
        self._layout, self._record = layout, record_experts
        self._closed = threading.Event()
        self._serve = jax.jit(
            functools.partial(as_served, precision=precision),
            out_shardings=None if layout is None else layout.tree(model.specs),
        )
        self.load(params, version=version)

    @property
    def version(self) -> int:
        """The policy version that the next request is sampled from."""
        return self._weights.version

    def load(self, params: Params, *, version: int) -> None:
        """Serves other weights from the next request on.

        They are cast to `precision.wire`, then to `precision.sampler`, on their devices. The
        sampler keeps a copy of its own: the learner may donate its arrays.
        """
        self._weights = _Weights(self._serve(params), version)

    def transfer(self, params: Params) -> str:
        """The program that brings weights from where the learner has them to where the sampler
        wants them, compiled, as HLO text."""
        return self._serve.lower(params).compile().as_text() or ""

    def close(self) -> None:
        """See `Sampler.close`."""
        self._closed.set()

    def sample(
        self, prompts: Sequence[np.ndarray], params: SamplingParams, *, group_size: int
    ) -> Iterator[Completion]:
        """Draws `group_size` answers to every prompt, in the order in which they finish.

        Args:
          prompts: i32[P] token ids each.
          params: how answers are drawn.
          group_size: answers per prompt.

        Raises:
          ValueError: at the call, for a prompt that is empty, too long for the model or not of its
            vocabulary, or for sampling params that make no sense.
          FloatingPointError: while iterating, if the model's logits are not finite.
          ClosedError: while iterating, after `close`.
        """
        config = self._model.config
        prompts = [np.asarray(prompt) for prompt in prompts]
        check_request(
            prompts,
            params,
            group_size=group_size,
            max_positions=config.max_positions,
            vocab_size=config.vocab_size,
        )
        return self._draw(
            [
                Turn(prompt, i, j, params.max_tokens)
                for i, prompt in enumerate(prompts)
                for j in range(group_size)
            ],
            params,
        )

    def sample_turns(self, turns: Sequence[Turn], params: SamplingParams) -> Iterator[Completion]:
        """See `Sampler.sample_turns`; raises as `sample`."""
        config = self._model.config
        turns = [turn._replace(context=np.asarray(turn.context)) for turn in turns]
        check_turns(turns, max_positions=config.max_positions, vocab_size=config.vocab_size)
        return self._draw(turns, params)

    def _draw(self, turns: Sequence[Turn], params: SamplingParams) -> Iterator[Completion]:
        # Prompts of like length share a batch; the sort is stable, so batches are reproducible.
        ordered = sorted(turns, key=lambda turn: len(turn.context))
        weights, version = self._weights
        request = Request(
            weights,
            version,
            params,
            self._model,
            self._precision,
            self._layout,
            self._max_batch,
            self._closed,
            self._record,
        )
        starts = range(0, len(ordered), self._max_batch)
        return (
            completion
            for i in starts
            for completion in run_batch(ordered[i : i + self._max_batch], request)
        )
