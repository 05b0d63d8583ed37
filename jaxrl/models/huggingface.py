"""Hugging Face checkpoint directories <-> parameters, driven by the `ParamSpec`s.

Tensors are read one by one from memory-mapped files and written bit for bit. Every tensor of a
checkpoint is used exactly once; a missing, surplus or misshapen one is an error that names it.
"""

import dataclasses
import itertools
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors.numpy import save_file

from jaxrl.core.casts import dtype_of
from jaxrl.core.precision import DType
from jaxrl.models import hf_config, spec
from jaxrl.models.checkpoint_files import (
    INDEX,
    SINGLE,
    check_file,
    named,
    read_object,
    read_parameter,
    shown,
    write_json,
)
from jaxrl.models.checkpoint_tensors import checked_tensors, unused_tensors, with_unused
from jaxrl.models.config_json import token_ids
from jaxrl.models.families import DecoderConfig
from jaxrl.models.fp8 import quant_method
from jaxrl.models.parameters import param_specs
from jaxrl.models.spec import Params, ParamSpec

# (path such as "layers/q", host array) -> array in its final place.
Put = Callable[[str, np.ndarray], Any]


def load_config(directory: str | Path) -> DecoderConfig:
    """Reads config.json.

    Raises:
      ValueError: if the directory has none or does not exist, or as `hf_config.from_hf_config`; the
        message names the file.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(
            f"the model '{directory}' is not a directory; relative paths start at {Path.cwd()}"
        )
    path = directory / "config.json"
    if not path.exists():
        inside = directory / "model"
        near = f"; did you mean '{inside}'?" if (inside / "config.json").exists() else ""
        raise ValueError(f"the model '{directory}' has no config.json{near}")
    raw = read_object(path)
    with named(path):
        return hf_config.from_hf_config(raw)


def is_quantised(directory: str | Path) -> bool:
    """Tells if weights of a checkpoint directory are in MXFP4 or FP8; raises ValueError without a
    config.json."""
    return quant_method(read_object(Path(directory) / "config.json")) in ("mxfp4", "fp8")


def load_tokenizer(directory: str | Path) -> Any:
    """Loads the tokenizer of a checkpoint directory, a `transformers.PreTrainedTokenizerBase`.

    Raises:
      ValueError: as `load_config`, and for a tokenizer that transformers cannot load or that has
        tokens outside of the model's vocabulary; the message names the file or directory.
    """
    directory = Path(directory)
    config = load_config(directory)  # transformers reads it, too, with worse errors
    for path in (directory / name for name in _TOKENIZER_FILES):
        if path.exists():
            check_file(path)
            if path.name in _OBJECTS:
                read_object(path)
    from transformers import AutoTokenizer  # seconds to import; only text needs it

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
        vocabulary = tokenizer.get_vocab()
        # A character that no text has, and every token: some settings fail only in use.
        tokenizer.encode("a \ue000", add_special_tokens=False)
        tokenizer.decode(list(vocabulary.values()))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # whatever its many readers raise; a panic is no Exception
        raise ValueError(
            f"{_unreadable(directory)}: transformers cannot load the tokenizer: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        ) from error
    template = tokenizer.chat_template or ""
    try:
        "".join(template.values() if isinstance(template, dict) else [template]).encode()
    except (TypeError, UnicodeEncodeError):
        raise ValueError(
            f"{directory}: chat_template={shown(template)} is not a text; see tokenizer_config.json"
        ) from None
    if len(vocabulary) == len(tokenizer.get_added_vocab()):
        raise ValueError(f"{directory} has no tokenizer: no file holds a vocabulary")
    last, size = max(vocabulary, key=vocabulary.__getitem__), config.vocab_size
    if vocabulary[last] >= size:
        raise ValueError(
            f"{directory}: the tokenizer's token {shown(last)} has the id {vocabulary[last]}, but "
            f"vocab_size={size} in config.json; remove the token or resize the embeddings"
        )
    return tokenizer


def _unreadable(directory: Path) -> str:
    """Names the file that keeps transformers from loading a tokenizer, as far as it is known."""
    from tokenizers import Tokenizer
    from transformers import AutoConfig

    readers = {"config.json": AutoConfig.from_pretrained, "tokenizer.json": Tokenizer.from_file}
    present = [name for name in ("config.json", *_TOKENIZER_FILES) if (directory / name).exists()]
    for name, read in readers.items():
        try:
            if name in present:
                read(str(directory / name))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            return str(directory / name)
    others = [name for name in present if name not in ("config.json", "generation_config.json")]
    return f"{directory} ({', '.join(others) or 'no tokenizer.json'})"


def load_end_ids(directory: str | Path) -> tuple[int, ...]:
    """Reads the token ids that end a completion, from config.json and generation_config.json. Chat
    models often list theirs only in the latter.

    Raises:
      ValueError: if they are not ids of the vocabulary, or as `load_config`.
    """
    config = load_config(directory)
    path = Path(directory) / "generation_config.json"
    if not path.exists():
        return config.eos_ids
    raw = read_object(path)
    with named(path):
        more = token_ids(raw.get("eos_token_id"), vocab_size=config.vocab_size)
    return tuple(dict.fromkeys((*config.eos_ids, *more)))


def load(
    directory: str | Path,
    *,
    dtype: DType | None,
    put: Put = lambda path, array: jnp.asarray(array),
    scored: bool = False,
) -> tuple[DecoderConfig, Params]:
    """Reads a checkpoint, one parameter at a time.

    Args:
      directory: holds config.json and model.safetensors or its shards and their index.
      dtype: dtype to cast parameters to; None keeps the files' dtype.
      put: places each parameter, for example on the devices of a mesh.
      scored: true for a reward model, a `transformers.AutoModelForSequenceClassification` with one
        label. A language model becomes one: its head is replaced by zeros, so the score of every
        text is 0.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if a file is corrupt, a tensor is missing, surplus or misshapen, or a dtype is not
        floating-point; the message names it. Also as `load_config`.
    """
    config = load_config(directory)
    named_as_read = dataclasses.replace(config, scored=True) if scored else config
    values: dict[str, Any] = {}
    with checked_tensors(Path(directory), config) as tensors:
        for path, one in spec.flatten(param_specs(named_as_read)).items():
            if path == "score" and not config.scored:
                value = np.zeros(one.shape, dtype or np.float32)
            else:
                value = read_parameter(one, tensors, dtype=dtype and dtype_of(path, dtype))
            values[path] = put(path, value)
    params = traverse_util.unflatten_dict(values, sep="/")
    return config.as_scorer() if scored else config, params


def save(
    directory: str | Path,
    params: Params,
    config: DecoderConfig,
    *,
    dtype: DType,
    source_dir: str | Path | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Writes a checkpoint that `transformers.AutoModelForCausalLM` and vLLM can load. For a reward
    model it is `AutoModelForSequenceClassification` instead.

    Args:
      directory: created if it does not exist; weights of an earlier save are replaced.
      params: the decoder's parameters, on any devices; fetched one at a time.
      config: the decoder's.
      dtype: dtype to cast tensors to.
      source_dir: directory to copy tokenizer and generation files from, and the tensors that
        training does not use (`checkpoint_tensors.unused_tensors`), those as they are there.
      max_shard_bytes: largest size of a file, unless a single tensor is larger. Several files get
        an index.

    Raises:
      ValueError: if `params` are not those of `config`; the message names the parameter. Also if
        the model is wrapped, and `source_dir` does not have it; or if that is `directory`, and
        has tensors to keep.
    """
    save_tensors(
        directory,
        _tensors(params, spec.flatten(param_specs(config)), dtype=dtype),
        config,
        dtype=dtype,
        source_dir=source_dir,
        max_shard_bytes=max_shard_bytes,
    )


def save_tensors(
    directory: str | Path,
    tensors: Iterable[tuple[str, np.ndarray]],
    config: DecoderConfig,
    *,
    dtype: DType,
    source_dir: str | Path | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Writes a checkpoint as `save`, from a stream of (Hugging Face name, tensor).

    Tensors are in `dtype` and in the order of the decoder's specs. Their shapes are those of
    Hugging Face, one tensor per layer or expert.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    flat = spec.flatten(param_specs(config))
    content = hf_config.to_hf_config(config, dtype=np.dtype(dtype).name)
    with unused_tensors(source_dir, config) as unused:
        if unused and source_dir is not None and directory.samefile(source_dir):
            raise ValueError(
                f"{directory} holds tensors that are to be kept ({next(iter(unused))!r}); write to "
                "another directory"
            )
        content = with_unused(content, source_dir, config, unused=unused)
        sizes = _sizes(flat, dtype=dtype) | {name: one.nbytes for name, one in unused.items()}
        stream = itertools.chain(tensors, ((name, one.read()) for name, one in unused.items()))
        listed = _write_shards(directory, stream, sizes, max_bytes=max_shard_bytes)
    write_json(directory / "config.json", content)
    # Files left by an earlier save with another number of shards would be read instead of these.
    for path in (*directory.glob("model*.safetensors"), directory / INDEX):
        if path.name not in listed:
            path.unlink(missing_ok=True)
    if source_dir is not None:
        copy_tokenizer(source_dir, directory)


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
    """Writes tensors in the order of `sizes`, and an index of several files; returns the names of
    the files."""
    shards = _plan_shards(sizes, max_bytes=max_bytes)
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        content = dict(next(tensors) for _ in names)
        # transformers rejects files without this metadata.
        save_file(content, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) == 1:
        return {SINGLE}
    metadata = {"total_size": sum(sizes.values())}
    write_json(directory / INDEX, {"metadata": metadata, "weight_map": weight_map})
    return {INDEX, *weight_map.values()}


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_OBJECTS = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"}


def copy_tokenizer(source_dir: str | Path, directory: str | Path) -> None:
    """Copies tokenizer and generation files from one checkpoint to another, if they exist."""
    for name in _TOKENIZER_FILES:
        source = Path(source_dir) / name
        target = Path(directory) / name
        if source.is_file() and not (target.exists() and target.samefile(source)):
            shutil.copyfile(source, target)


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
        value = np.asarray(given[path]).astype(dtype_of(path, dtype))
        value = one.swap(value).reshape(-1, *one.tensor_shape)
        for name, tensor in zip(one.hf_names(), value, strict=True):
            yield name, np.ascontiguousarray(tensor)
