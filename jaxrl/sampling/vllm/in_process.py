"""Sampling by vLLM's TPU engine in this process."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from jaxrl.sampling.base import ClosedError, Completion, Sampler, SamplingParams, Turn, check_turns
from jaxrl.sampling.vllm.router import SamplerError
from jaxrl.sampling.vllm.sampler import find_end, stop_settings
from jaxrl.sampling.vllm.tpu_engine import Ended


class Engine(Protocol):
    """The part of `TpuEngine` that samples."""

    def add(self, prompt: np.ndarray, settings: Mapping[str, Any]) -> str:
        """See `TpuEngine.add`."""
        ...

    def step(self) -> list[Ended]:
        """See `TpuEngine.step`."""
        ...

    def abort(self, names: Sequence[str]) -> None:
        """See `TpuEngine.abort`."""
        ...

    def use_seed(self, seed: int) -> None:
        """See `TpuEngine.use_seed`."""
        ...


class VllmTpuSampler(Sampler):
    """A `Sampler` over an engine in this process.

    Requests of several threads run one after another, and new weights wait for the request that is
    running. A request's completions are a function of the weights, of all its turns, the params and
    the seed, and of the prefixes that the engine has kept since the last publish: those decide
    which tokens are computed together. One completion alone cannot be drawn again, since the engine
    takes no seed for it.
    """

    def __init__(self, engine: Engine, *, max_positions: int, vocab_size: int) -> None:
        """Makes the sampler. It serves the engine's random weights before the first `replace`.

        Args:
          engine: the engine, which nothing else may use.
          max_positions: maximum length of a prompt with its completion, in tokens.
          vocab_size: number of the model's token ids.
        """
        self._engine = engine
        self._limits = {"max_positions": max_positions, "vocab_size": vocab_size}
        self._version, self._broken = 0, ""
        self._busy, self._closed = threading.Lock(), threading.Event()
        self._user: int | None = None  # the thread that holds the lock

    @property
    def version(self) -> int:
        """The policy version that was published last."""
        return self._version

    def replace(
        self, write: Callable[[], None], *, check: Callable[[], None], version: int
    ) -> None:
        """Serves other weights, once the running request has ended.

        Args:
          write: replaces the engine's weights. After an error the sampler is broken for good.
          check: runs before; after its error the old weights are served.
          version: their policy version.

        Raises:
          SamplerError: if an earlier `write` failed.
          Exception: any error of `check` and `write`.
        """
        with self._alone():
            self._check_usable()
            check()
            self._broken = (
                f"publishing version {version} failed halfway, so the engine's weights are a "
                "mixture; start the run again"
            )
            write()
            self._broken, self._version = "", version

    def close(self) -> None:
        """See `Sampler.close`."""
        self._closed.set()

    def sample_turns(self, turns: Sequence[Turn], params: SamplingParams) -> Iterator[Completion]:
        """See `Sampler.sample_turns`.

        Raises:
          ValueError: also for `min_p`, which the engine ignores.
          SamplerError: while iterating, if the last publish failed.
        """
        if params.min_p:
            raise ValueError(
                f"sampling.min_p = {params.min_p}: vLLM's TPU engine accepts and ignores it; set "
                "it to 0, or use top_p"
            )
        return self._completions(check_turns(turns, **self._limits), params)

    def _completions(self, turns: Sequence[Turn], params: SamplingParams) -> Iterator[Completion]:
        with self._alone():
            self._check_usable()
            waiting = dict[str, Turn]()
            try:
                self._engine.use_seed(params.seed)
                for turn in turns:
                    waiting[self._engine.add(turn.context, _settings(turn, params))] = turn
                while waiting:
                    if self._closed.is_set():
                        raise ClosedError("the sampler was closed")
                    for ended in self._engine.step():
                        turn = waiting.pop(ended.request)
                        yield _completion(turn, ended, params, version=self._version)
            finally:
                self._engine.abort(list(waiting))

    def _check_usable(self) -> None:
        if self._broken:
            raise SamplerError(self._broken)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._user == threading.get_ident():
            raise SamplerError(
                "this thread is still iterating over completions of the same engine; finish or "
                "close that iteration first"
            )
        with self._busy:
            self._user = threading.get_ident()
            try:
                yield
            finally:
                self._user = None


def _settings(turn: Turn, params: SamplingParams) -> dict[str, Any]:
    """Returns vLLM's sampling parameters of a turn."""
    return {
        "max_tokens": turn.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        **stop_settings(params),
    }


def _completion(turn: Turn, ended: Ended, params: SamplingParams, *, version: int) -> Completion:
    end = find_end(ended.tokens, params)
    tokens = np.asarray(ended.tokens[:end], np.int32)
    return Completion(
        prompt_index=turn.prompt_index,
        sample_index=turn.sample_index,
        tokens=tokens,
        logprobs=np.asarray(ended.logprobs[:end], np.float32),
        versions=np.full(len(tokens), version, np.int32),
        finish_reason="length" if ended.reason == "length" and end is None else "stop",
    )
