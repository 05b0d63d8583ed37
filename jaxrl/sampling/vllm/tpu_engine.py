"""vLLM's TPU engine (tpu-inference) in this process, beside jax.

It is vLLM's scheduler over a model in JAX whose weights are arrays of this process. Everything that
reaches into vLLM is here. Written for vllm-tpu 0.32.0.
"""

import importlib
import importlib.util
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.core.precision import DType
from jaxrl.sampling.vllm.logprobs import valid_logprob
from jaxrl.sampling.vllm.router import SamplerError


def prepare_tpu_engine() -> None:
    """Imports vLLM's TPU plugin, which puts options of XLA and libtpu into the environment. Call it
    before jax looks for devices.

    Raises:
      SamplerError: if vllm-tpu is not installed.
    """
    if importlib.util.find_spec("tpu_inference") is None:
        raise SamplerError(
            "vLLM's TPU engine runs in the learner's process, and this environment has no "
            "vllm-tpu; scripts/install_vllm_tpu.sh makes .venv-vllm-tpu with both, for Python 3.12"
        )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no process for the engine
    os.environ["MODEL_IMPL_TYPE"] = "flax_nnx"  # models in JAX, never those in torch
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    importlib.import_module("tpu_inference")


class Ended(NamedTuple):
    """A completion that the engine has ended."""

    request: str  # as `TpuEngine.add` named it
    tokens: Sequence[int]
    logprobs: Sequence[float]  # of the tokens
    reason: str  # "stop" or "length"


class TpuEngine:
    """An engine with random weights, until a publish writes others.

    Not for several threads at a time.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        devices: Sequence[Any],
        dtype: DType,
        max_model_len: int,
        max_batch: int,
        cache_tokens: int | None = None,
    ) -> None:
        """Builds the engine, which empties jax's caches of compiled functions: build it before the
        learner's first step.

        Args:
          directory: a model of the Hugging Face format; its weights are not read.
          devices: `jax.Device`s of this process that each hold a shard of every matrix.
          dtype: of weights, activations and KV cache.
          max_model_len: maximum length of a prompt with its completion, in tokens.
          max_batch: completions that are decoded at once; others wait.
          cache_tokens: capacity of the KV cache; None for `max_batch` completions of full length.
        """
        import vllm
        from vllm.v1.engine.llm_engine import LLMEngine

        strategy = {"device_indexes": [device.id for device in devices]}
        config = vllm.EngineArgs(
            model=str(directory),
            load_format="dummy",
            dtype=dtype.name,
            max_model_len=max_model_len,
            max_num_seqs=max_batch,
            tensor_parallel_size=len(devices),
            gpu_memory_utilization=1.0,  # unused: the number of blocks is given
            logprobs_mode="processed_logprobs",
            max_logprobs=1,
            enable_prefix_caching=True,
            additional_config={"sharding": {"sharding_strategy": strategy}},
        ).create_engine_config()
        block = config.cache_config.block_size
        one = -(-max_model_len // block)
        blocks = max_batch * one if cache_tokens is None else max(one, cache_tokens // block)
        config.cache_config.num_gpu_blocks_override = blocks + 1  # vLLM keeps one for itself
        self._engine = LLMEngine.from_vllm_config(config)
        self._engine._finalizer.detach()  # it asks a flax model for modules of torch
        executor = self._engine.engine_core.engine_core.model_executor
        self._runner = executor.driver_worker.worker.model_runner
        self._sampling_params = vllm.SamplingParams
        self._final = vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        self._names = map(str, itertools.count())
        state = self._runner.state.flat_state()
        self._order = [".".join(map(str, path)) for path, _ in state]
        # Llama's model also holds the state of a random generator.
        self._variables = {
            name: variable
            for name, (_, variable) in zip(self._order, state, strict=True)
            if jnp.issubdtype(variable.get_value().dtype, jnp.floating)
        }
        self.cache_tokens = blocks * block

    def add(self, prompt: np.ndarray, settings: Mapping[str, Any]) -> str:
        """Adds a request for one completion with vLLM's sampling parameters; returns its name."""
        name = next(self._names)
        params = self._sampling_params(**settings, logprobs=1, output_kind=self._final)
        self._engine.add_request(name, {"prompt_token_ids": prompt.tolist()}, params)
        return name

    def step(self) -> list[Ended]:
        """Computes one step of all running requests; returns the completions that ended in it."""
        ended = []
        for output in self._engine.step():
            if output.finished:
                (one,) = output.outputs
                chosen = zip(one.token_ids, one.logprobs or (), strict=True)
                logprobs = [valid_logprob(found[token].logprob) for token, found in chosen]
                tokens = list(one.token_ids)
                ended.append(Ended(output.request_id, tokens, logprobs, one.finish_reason))
        return ended

    def abort(self, names: Sequence[str]) -> None:
        """Ends requests without their completions."""
        self._engine.abort_request(list(names))
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def use_seed(self, seed: int) -> None:
        """Draws the next random numbers from a seed; the engine takes none for a request."""
        key = jax.random.fold_in(jax.random.key(seed % 2**32), seed // 2**32)
        old = self._runner.rng_params_for_sampling
        self._runner.rng_params_for_sampling = jax.device_put(key, old.sharding)

    def leaves(self) -> Mapping[str, jax.Array]:
        """Returns the arrays of the engine's model by name."""
        return {name: variable.get_value() for name, variable in self._variables.items()}

    def served(self) -> Mapping[str, jax.Array]:
        """Returns the arrays that its compiled steps take, by the same names."""
        taken = dict(zip(self._order, self._runner.state_leaves, strict=True))
        return {name: taken[name] for name in self._variables}

    def write(self, leaf: str, array: jax.Array) -> None:
        """Replaces an array of the model and frees the old one, also where compiled steps still
        take it."""
        variable = self._variables[leaf]
        old = variable.get_value()
        variable.set_value(array)
        old.delete()

    def reset_prefix_cache(self) -> bool:
        """Forgets the prefixes in the KV cache; returns False if requests hold some of it."""
        return self._engine.reset_prefix_cache()

    def start_weight_update(self) -> None:
        """Frees the KV cache."""
        self._engine.collective_rpc("start_weight_update")

    def refresh(self) -> None:
        """Makes the compiled steps take the model's present arrays."""
        self._engine.collective_rpc("refresh_model_state_leaves")

    def finish_weight_update(self) -> None:
        """Allocates the KV cache."""
        self._engine.collective_rpc("finish_weight_update")
