"""Writing of Hugging Face checkpoint directories, bit for bit, driven by the `ParamSpec`s."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from jaxrl.core.casts import dtype_of
from jaxrl.core.precision import DType
from jaxrl.huggingface import eight_bits
from jaxrl.huggingface.checkpoint import Checkpoint
from jaxrl.huggingface.config import convert
from jaxrl.huggingface.files import INDEX, SINGLE, finite_cast, write_json, write_tensors
from jaxrl.huggingface.tokenizer import copy_processor, copy_tokenizer, write_end_ids
from jaxrl.huggingface.unused import unused_tensors, with_unused
from jaxrl.models import spec
from jaxrl.models.families import DecoderConfig
from jaxrl.models.parameters import param_specs
from jaxrl.models.spec import Params, ParamSpec


def save(
    directory: str | Path,
    params: Params,
    config: DecoderConfig,
    *,
    dtype: DType,
    source: Checkpoint | None = None,
    blocks: str = "none",
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Writes a checkpoint that `transformers.AutoModelForCausalLM` and vLLM can load. For a reward
    model it is `AutoModelForSequenceClassification` instead.

    Args:
      directory: created if it does not exist; earlier weights in it are replaced.
      params: the decoder's parameters, on any devices; fetched one by one. With a "head" beside a
        tied embedding, which `lora.merge` makes, the checkpoint has an output layer of its own.
      config: the decoder's.
      dtype: dtype to cast tensors to.
      source: checkpoint whose tokenizer, generation files, unused tensors
        (`unused.unused_tensors`) and, for a wrapped model, processor of images are copied. Its
        `end_ids` go into generation_config.json.
      blocks: form of the matrices of layers: "none", or "e4m3" or "int8", see `eight_bits`.
      max_shard_bytes: largest size of a file, unless a single tensor is larger. Several files get
        an index.

    Raises:
      ValueError: if `params` do not fit `config`, or have finite values that are infinite in
        `dtype`; the message names the parameter. Also if `blocks` does not fit it, the model is
        wrapped and `source` does not have it, or if `source` has unused tensors and is in
        `directory` itself.
    """
    if config.tied and "head" in params:
        config = dataclasses.replace(config, tied=False)
    save_tensors(
        directory,
        _tensors(params, spec.flatten(param_specs(config)), dtype=dtype),
        config,
        dtype=dtype,
        source=source,
        blocks=blocks,
        max_shard_bytes=max_shard_bytes,
    )


def save_tensors(
    directory: str | Path,
    tensors: Iterable[tuple[str, np.ndarray]],
    config: DecoderConfig,
    *,
    dtype: DType,
    source: Checkpoint | None = None,
    blocks: str = "none",
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Writes a checkpoint as `save`, from a stream of (Hugging Face name, tensor).

    Tensors are in `dtype`, in the order of the decoder's specs and in Hugging Face's shapes, one
    per layer or expert.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    flat = spec.flatten(param_specs(config))
    content = convert.to_hf_config(config, dtype=np.dtype(dtype).name)
    with unused_tensors(source, config) as unused:
        if unused and source is not None and directory.samefile(source.directory):
            raise ValueError(
                f"{directory} holds tensors that must be kept ({next(iter(unused))!r}); write to "
                "another directory"
            )
        if unused and blocks != "none":
            raise ValueError(
                f"blocks={blocks}: {directory} would hold tensors that stay in 16 bits "
                f"({next(iter(unused))!r}), which vLLM would misread; leave blocks out"
            )
        content = with_unused(content, source, config, unused=unused)
        sizes = _sizes(flat, dtype=dtype)
        if blocks != "none":
            config.check_blocks(blocks)
            matrices = eight_bits.matrices(flat, blocks=blocks)
            tensors = eight_bits.in_eight_bits(tensors, matrices, blocks=blocks)
            sizes = eight_bits.sizes(sizes, flat, matrices, blocks=blocks)
            written = eight_bits.quantization_config(flat, matrices, blocks=blocks)
            content["quantization_config"] = written
        sizes |= {name: one.nbytes for name, one in unused.items()}
        stream = itertools.chain(tensors, ((name, one.read()) for name, one in unused.items()))
        listed = _write_shards(directory, stream, sizes, max_bytes=max_shard_bytes)
    write_json(directory / "config.json", content)
    # Files left by an earlier save with another number of shards would be read instead of these.
    for path in (*directory.glob("model*.safetensors"), directory / INDEX):
        if path.name not in listed:
            path.unlink(missing_ok=True)
    if source is not None:
        copy_tokenizer(source.directory, directory)
        if config.wrapped:
            copy_processor(source.directory, directory)
        if not config.scored:
            # A tokenizer that cannot be read has not ended any completion.
            with contextlib.suppress(OSError, ValueError):
                write_end_ids(directory, source.end_ids, content=source.content)


def _sizes(flat: Mapping[str, ParamSpec], *, dtype: DType) -> dict[str, int]:
    """Lists the bytes of each tensor of a decoder by its Hugging Face name."""
    return {
        name: dtype_of(path, dtype).itemsize * math.prod(one.tensor_shape)
        for path, one in flat.items()
        for name in one.hf_names()
    }


def _write_shards(
    directory: Path,
    tensors: Iterator[tuple[str, np.ndarray]],
    sizes: Mapping[str, int],
    *,
    max_bytes: int,
) -> set[str]:
    """Writes tensors in the order of `sizes`, and the index of several files; returns the files'
    names."""
    shards = _plan_shards(sizes, max_bytes=max_bytes)
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        content = dict(next(tensors) for _ in names)
        write_tensors(directory / file, content)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) == 1:
        return {SINGLE}
    metadata = {"total_size": sum(sizes.values())}
    write_json(directory / INDEX, {"metadata": metadata, "weight_map": weight_map})
    return {INDEX, *weight_map.values()}


def _plan_shards(sizes: Mapping[str, int], *, max_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    room = max_bytes
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _tensors(
    params: Params, flat: Mapping[str, ParamSpec], *, dtype: DType
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (Hugging Face name, host tensor) in the order of the specs."""
    given: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")
    if unknown := sorted(set(given) ^ set(flat)):
        raise ValueError(f"parameters do not fit the config: {', '.join(unknown)}")
    for path, one in flat.items():
        if given[path].shape != one.shape:
            raise ValueError(
                f"parameter {path!r} has shape {given[path].shape}, expected {one.shape}"
            )
        value = finite_cast(
            np.asarray(given[path]), dtype_of(path, dtype), name=f"parameter {path!r}"
        )
        value = one.swap(value).reshape(-1, *one.tensor_shape)
        for name, tensor in zip(one.hf_names(), value, strict=True):
            yield name, np.ascontiguousarray(tensor)
