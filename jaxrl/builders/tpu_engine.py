"""Builds vLLM's TPU engine in this process, with the publish of the learner's weights to it."""

import functools
import importlib.metadata
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxrl.bridge import EnginePublisher, engine_refusal, token_bytes
from jaxrl.builders.weight_sync import Publish, WeightRoute
from jaxrl.config.sampler import SamplerConfig
from jaxrl.core import Precision, short_name
from jaxrl.models import DecoderConfig, lora
from jaxrl.sampling import Sampler, TpuEngine, VllmTpuSampler


def engine_devices(config: SamplerConfig, model: DecoderConfig, *, mesh: Iterable[Any]) -> list:
    """Returns the devices that hold a shard of the engine's weights each: the first of the
    sampler's own, or of those of the learner's mesh.

    Raises:
      ValueError: if there are fewer than `sampler.tensor`.
    """
    found = jax.devices()[-config.devices :] if config.devices else list(mesh)
    if config.tensor is None:
        return found[: math.gcd(len(found), model.num_kv_heads)]
    if config.tensor > len(found):
        raise ValueError(
            f"sampler.tensor = {config.tensor}: the sampler has {len(found)} devices; lower it"
        )
    return found[: config.tensor]


def engine_cache_tokens(config: SamplerConfig, model: DecoderConfig, *, dtype: str) -> int | None:
    """Returns the tokens that `sampler.kv_cache_bytes` holds; None if it is not given."""
    if config.kv_cache_bytes is None:
        return None
    return config.kv_cache_bytes // token_bytes(model, dtype)


def head_note(precision: Precision) -> str | None:
    """Describes the difference between the heads of engine and learner, and the remedy; None if
    there is none. The engine has no setting for its head.

    Example:
      >>> print(head_note(Precision.of("bf16_master")))
      vLLM's TPU engine computes logits in bfloat16 and the learner in float32, which is part of
      every ratio; for equal heads train with logits=bf16 in precision
      >>> head_note(Precision.of("fp32")) is None
      True
    """
    if precision.logits == precision.sampler:
        return None
    return (
        f"vLLM's TPU engine computes logits in {precision.sampler.name} and the learner in "
        f"{precision.logits.name}, which is part of every ratio; for equal heads train with "
        f"logits={short_name(precision.sampler)} in precision"
    )


def open_tpu_engine(
    config: SamplerConfig,
    weights: WeightRoute,
    *,
    devices: Iterable[Any],
    max_model_len: int,
    max_batch: int,
    note: Callable[[str], None],
) -> tuple[Sampler, Publish, dict[str, str]]:
    """Builds the engine and publishes `weights` to it; returns its sampler, the publish, and the
    names and values of what the engine's arithmetic depends on.

    Args:
      config: the config's sampler.
      weights: the weights that it serves first.
      devices: the learner's.
      max_model_len: maximum length of a prompt with its completion, in tokens.
      max_batch: completions that are decoded at once.
      note: shows a line to the user.

    Raises:
      ValueError: for a model that jaxrl cannot publish to the engine, or as `engine_devices`.
      RefusedError: if the engine's arrays are not those that jaxrl knows.
    """
    model, dtype = weights.model.config, weights.precision.sampler
    if weights.checkpoint.is_quantised:
        raise ValueError(
            f"{weights.checkpoint.directory} is quantised (quantization_config in config.json), "
            "and the engine would expect weights in that form; write a copy in bf16, see "
            "docs/models.md, and name it in model.path"
        )
    used = engine_devices(config, model, mesh=devices)
    if (reason := engine_refusal(model, shards=len(used))) is not None:
        raise ValueError(f"sampler.name = 'vllm_tpu' and {weights.checkpoint.directory}: {reason}")
    engine = TpuEngine(
        weights.checkpoint.directory,
        devices=used,
        dtype=dtype,
        max_model_len=max_model_len,
        max_batch=max_batch,
        cache_tokens=engine_cache_tokens(config, model, dtype=dtype.name),
    )
    publisher = EnginePublisher(
        engine, weights.model.specs, config=model, precision=weights.precision
    )
    sampler = VllmTpuSampler(engine, max_positions=max_model_len, vocab_size=model.vocab_size)

    def publish(params: Any, *, version: int) -> dict[str, float]:
        merged = lora.merge(params)
        sampler.replace(
            functools.partial(publisher.write, merged),
            check=functools.partial(publisher.check, merged),
            version=version,
        )
        return {}

    note(
        f"vLLM's TPU engine in this program: {dtype.name}, {len(used)} "
        f"device{'s' * (len(used) > 1)}, KV cache for {engine.cache_tokens} tokens"
    )
    if (difference := head_note(weights.precision)) is not None:
        note(difference)
    publish(weights.params, version=weights.version)
    facts = {"sampler": "vLLM's TPU engine", "sampler.tensor": str(len(used))}
    facts |= {name: importlib.metadata.version(name) for name in ("vllm-tpu", "tpu-inference")}
    return sampler, publish, facts
