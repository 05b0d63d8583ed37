"""Sampling with JAX on the learner's own devices: the default sampler, without a server."""

import functools
import operator
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jaxrl.core.buckets import count_bucket
from jaxrl.core.casts import as_served
from jaxrl.core.compiled import jit
from jaxrl.core.precision import Precision, check_products, sampler_precision
from jaxrl.models.families import DecoderConfig
from jaxrl.models.latent import check_form
from jaxrl.models.lora import Adapted, declared, stacked
from jaxrl.models.model import Model
from jaxrl.models.spec import Params
from jaxrl.sampling.base import (
    Completion,
    Sampler,
    SamplingParams,
    Turn,
    check_recorded,
    check_turns,
)
from jaxrl.sampling.embedded.batch_decoding import decode_turns
from jaxrl.sampling.embedded.full_forward import decode_batch_without_cache
from jaxrl.sampling.embedded.own_batch import OwnBatch
from jaxrl.sampling.embedded.own_turns import OwnTurns
from jaxrl.sampling.embedded.request import DecodeRequest
from jaxrl.sampling.embedded.unstacked import unstack, unstack_shardings, wants_unstacked
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.transfer import place


class _Weights(NamedTuple):
    params: Params
    version: int


class EmbeddedSampler(Sampler):
    """A `Sampler` that decodes with a KV cache; models other than jaxrl's decoder, without one.

    A completion is a function of the weights, the prompt, prompt index, sample index, sampling
    params and seed. Other prompts of the request change it only by rounding: matrix products have
    other sizes.

    If a request has more completions than are decoded at once, waiting ones take the rows of ended
    ones. A group's prompt is computed once for all completions that begin together. The turns of an
    episode share a `TurnCache`: if it holds the beginning of a context, only the rest is computed.

    One program is compiled per power-of-two number of prompts or completions and per length bucket;
    to copy kept caches, one per pair of sizes.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        *,
        precision: Precision | str = "fp32",
        version: int = 0,
        max_batch: int = 64,
        layout: Layout | None = None,
        record_experts: bool = False,
        record_kept: bool = False,
    ):
        """Makes a sampler that serves `params`.

        Args:
          model: the decoder.
          params: the learner's weights, in any dtype.
          precision: the run's dtype policy, or its text; the sampler uses `sampler_precision` of
            it.
          version: the policy version of `params`.
          max_batch: the most completions decoded at once. A larger batch uses the machine better;
            each needs KV cache, 2 * layers * kv heads * head_dim numbers per token; with
            `latent=sampler`, layers * (kv_rank + rope_dim).
          layout: placement of the sampler's weights and batches on a mesh, of the learner's devices
            or of others; None leaves the weights where they are.
          record_experts: True for completions that record the experts the layers chose.
          record_kept: True for completions of truncated distributions that record the tokens that
            were kept; requests then need a `top_k` of at most `most_kept`.

        Raises:
          ValueError: if `max_batch` is below 1, if experts are to be recorded of a dense model, if
            the devices of `params` cannot compute products as `precision` says, if it fixes the
            order of sums and the layout divides weights, or if it names a form of latent attention
            for a model without any.
        """
        if record_experts and model.config.experts is None:
            raise ValueError("record_experts=True needs a model with experts; this one is dense")
        if max_batch < 1:
            raise ValueError(f"max_batch={max_batch}: it must be at least 1")
        precision = Precision.of(precision)
        devices = jax.tree.leaves(params)[0].devices()
        check_form(precision, model.config)
        check_products(precision, next(iter(devices)).platform, devices=len(devices))
        self._model, self._max_batch, self._closed = model, max_batch, threading.Event()
        self._request = functools.partial(
            DecodeRequest,
            model=model,
            precision=sampler_precision(precision),
            layout=layout,
            max_batch=max_batch,
            closed=self._closed,
            record_experts=record_experts,
            record_kept=record_kept,
        )
        self.records_kept = record_kept
        if precision.sums == "fixed" and layout is not None:
            _check_whole(layout, model)
        self._layout = layout
        self._apart = layout is not None and devices.isdisjoint(layout.mesh.devices.flat)
        own = next(iter(devices)) if layout is None else layout.mesh.devices.flat[0]
        self._split = model.config if wants_unstacked(own, model.config) else None
        self._precision = precision  # an argument, so that samplers share the compiled program
        self._programs: dict[Any, Any] = {}
        self._last_stacked: tuple[list[Any], Any, Params] = [], jax.tree.structure([]), {}
        self.load(params, version=version)

    @property
    def version(self) -> int:
        """The policy version that the next request is sampled from."""
        return self._weights.version

    def load(self, params: Params, *, version: int) -> None:
        """Serves other weights from the next request on.

        They are cast to `precision.wire`, then to `precision.sampler`, on their devices. The
        sampler keeps its own copy, so the learner may donate its arrays. On a GPU each layer's are
        arrays of their own.
        """
        served = self._serve(params)(params, self._precision, self._split)
        if self._apart:
            served = place(served, self._shardings(params))
        self._weights = _Weights(served, version)

    def open_own(self) -> OwnBatch:
        """Opens a batch of turns with settings and adapters of their own, from the weights that are
        served now.

        Raises:
          ValueError: for a model without a KV cache, and if tokens that truncation keeps are
            recorded.
        """
        if self.records_kept or not isinstance(self._model.config, DecoderConfig):
            raise ValueError(
                "turns with settings of their own need jaxrl's decoder and record_kept=False; use "
                "sample_turns, with one setting for all"
            )
        served, version = self._weights

        def request(own: OwnTurns, adapters: Sequence[Params]) -> DecodeRequest:
            weights = served
            if adapters:
                stack = self._stack(adapters, count=count_bucket(len(adapters)))
                weights = declared(Adapted(stack, served, 1.0))
            params = SamplingParams(max_tokens=1)  # each turn has its own
            return self._request(weights, version, params)._replace(own=own)

        parts = 1 if self._layout is None else self._layout.count("batch")
        return OwnBatch(check=self._checked, request=request, parts=parts)

    def _stack(self, adapters: Sequence[Params], *, count: int) -> Params:
        """Stacks adapters as the sampler takes them, with some that adapt nothing up to `count`;
        the last result is kept."""
        arrays, form = jax.tree.flatten([*adapters])  # dicts and lists may have changed since
        known, same_form, result = self._last_stacked
        if form != same_form or not all(map(operator.is_, arrays, known)):
            if "stack" not in self._programs:
                own = None if self._layout is None else self._layout.replicated
                self._programs["stack"] = jit(_stacked, static_argnums=(1, 2), out_shardings=own)
            several = [*adapters, *[{}] * (count - len(adapters))]
            result = self._programs["stack"](several, self._precision, self._split)
            self._last_stacked = arrays, form, result
        return result

    def _checked(self, turns: Sequence[Turn]) -> list[Turn]:
        """Checks turns and sorts them: prompts of similar length are prefilled together. The sort
        is stable, so that batches are reproducible."""
        config = self._model.config
        turns = check_turns(turns, max_positions=config.max_positions, vocab_size=config.vocab_size)
        return sorted(turns, key=lambda turn: len(turn.context))

    def transfer_hlo(self, params: Params) -> str:
        """Returns the HLO text of the compiled program that `load` runs: it casts the weights and
        moves them from the learner's layout to the sampler's."""
        lowered = self._serve(params).lower(params, self._precision, self._split)
        return lowered.compile().as_text() or ""

    def _serve(self, params: Params) -> Any:
        """Returns the program that casts the weights; adapters beside them need another one."""
        structure = jax.tree.structure(params)
        if structure not in self._programs:
            shardings = None if self._apart else self._shardings(params)
            self._programs[structure] = jit(_served, static_argnums=(1, 2), out_shardings=shardings)
        return self._programs[structure]

    def _shardings(self, params: Params) -> Any:
        if self._layout is None:
            return None
        found = self._layout.state(params, self._model.specs)
        return found if self._split is None else unstack_shardings(found, self._split)

    def close(self) -> None:
        """See `Sampler.close`."""
        self._closed.set()

    def sample_turns(self, turns: Sequence[Turn], params: SamplingParams) -> Iterator[Completion]:
        """See `Sampler.sample_turns`.

        Raises:
          FloatingPointError: while iterating, if the model's logits are not finite.
          ValueError: at the call, also for a truncated distribution without a `top_k` that the
            record has room for, if the sampler records it.
        """
        config = self._model.config
        if self.records_kept:
            check_recorded(params, config.vocab_size)
        turns = self._checked(turns)
        request = self._request(*self._weights, params)
        if isinstance(config, DecoderConfig):
            return decode_turns(turns, request)
        return (
            completion
            for i in range(0, len(turns), self._max_batch)
            for completion in decode_batch_without_cache(turns[i : i + self._max_batch], request)
        )


def _served(params: Params, precision: Precision, split: DecoderConfig | None) -> Params:
    """Casts weights for the sampler, and divides them by layer if `split` is their decoder."""
    served = as_served(params, precision)
    return served if split is None else unstack(served, split)


def _stacked(
    several: Sequence[Params], precision: Precision, split: DecoderConfig | None
) -> Params:
    return _served(stacked(several), precision, split)


def _check_whole(layout: Layout, model: Model) -> None:
    """Checks that no device has a part of the weights, hence of a sum whose order is fixed."""
    if not all(one.is_fully_replicated for one in jax.tree.leaves(layout.tree(model.specs))):
        raise ValueError(
            "sums=fixed, but the layout divides weights, hence the sums of a token, over devices; "
            "use a mesh of data alone, such as sharding.remesh(mesh)"
        )
