"""Hugging Face checkpoint directories <-> parameters, driven by the `ParamSpec`s.

Tensors are read one by one from memory-mapped files and written bit for bit. Every tensor of a
checkpoint is used exactly once; a missing, surplus or misshapen one is an error that names it.
"""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl.core.precision import DType
from jaxrl.models import families, spec
from jaxrl.models.decoder import param_specs
from jaxrl.models.families import DecoderConfig
from jaxrl.models.spec import Params, ParamSpec

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}

# (path such as "layers/q", host array) -> array in its final place.
Put = Callable[[str, np.ndarray], Any]


def _on_default_device(path: str, array: np.ndarray) -> jax.Array:
    del path
    return jnp.asarray(array)


def load_config(directory: str | Path) -> DecoderConfig:
    """Reads config.json.

    Raises:
      FileNotFoundError: if it does not exist.
      ValueError: if it is not JSON, or as `families.from_hf_config`.
    """
    return families.from_hf_config(_read_json(Path(directory) / "config.json"))


def load_tokenizer(directory: str | Path) -> Any:
    """Loads the tokenizer of a checkpoint directory, a `transformers.PreTrainedTokenizerBase`.

    Raises:
      ValueError: if the directory does not exist, or has no model in it.
    """
    if not Path(directory).is_dir():
        raise ValueError(
            f"the model '{directory}' is not a directory; models are read from disk: download it "
            f"with `hf download {directory} --local-dir DIRECTORY` and name that directory"
        )
    if not (Path(directory) / "config.json").exists():
        inside = Path(directory) / "model"
        near = f"; did you mean '{inside}'?" if (inside / "config.json").exists() else ""
        raise ValueError(f"the model '{directory}' has no config.json{near}")
    from transformers import AutoTokenizer  # seconds to import; only text needs it

    return AutoTokenizer.from_pretrained(str(directory))


def load_end_ids(directory: str | Path) -> tuple[int, ...]:
    """Reads the token ids that end a completion, from config.json and generation_config.json. Chat
    models often list theirs only in the latter."""
    config = load_config(directory)
    path = Path(directory) / "generation_config.json"
    generation = _read_json(path).get("eos_token_id") if path.exists() else None
    return tuple(dict.fromkeys((*config.eos_ids, *families.token_ids(generation))))


def load(
    directory: str | Path, *, dtype: DType | None, put: Put = _on_default_device
) -> tuple[DecoderConfig, Params]:
    """Reads a checkpoint, one parameter at a time.

    Args:
      directory: holds config.json and model.safetensors or its shards and their index.
      dtype: dtype to cast parameters to; None keeps the files' dtype.
      put: places each parameter, for example on the devices of a mesh.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if a file is corrupt, a tensor is missing, surplus or misshapen, or a dtype is not
        floating-point; the message names it. Also as `load_config`.
    """
    config = load_config(directory)
    with _checked_tensors(Path(directory), config) as tensors:
        values = {
            path: put(path, _read_parameter(one, tensors, dtype=dtype))
            for path, one in spec.flatten(param_specs(config)).items()
        }
    return config, traverse_util.unflatten_dict(values, sep="/")


def load_scorer(
    directory: str | Path, *, dtype: DType, put: Put = _on_default_device
) -> tuple[DecoderConfig, Params]:
    """Reads a reward model, or initialises one from a language model.

    A reward model is a `transformers.AutoModelForSequenceClassification` with one label. From a
    language model the head is replaced by zeros, so the score of every text is 0. Arguments and
    errors are those of `load`.
    """
    config = load_config(directory)
    scorer = dataclasses.replace(config, scored=True)
    with _checked_tensors(Path(directory), config) as tensors:
        values = {
            path: put(
                path,
                _read_parameter(one, tensors, dtype=dtype)
                if config.scored or path != "score"
                else np.zeros(one.shape, dtype),
            )
            for path, one in spec.flatten(param_specs(scorer)).items()
        }
    return scorer, traverse_util.unflatten_dict(values, sep="/")


@contextlib.contextmanager
def _checked_tensors(directory: Path, config: DecoderConfig) -> Iterator[dict[str, Any]]:
    """Opens a checkpoint as `_open_tensors`; checks that its names are those of the decoder."""
    flat = spec.flatten(param_specs(config))
    with contextlib.ExitStack() as stack:
        tensors = _open_tensors(directory, stack)
        expected = {name for one in flat.values() for name in one.hf_names()}
        _check_names(expected, set(tensors), config=config, directory=directory)
        _check_tied_head(tensors, config=config, directory=directory)
        yield tensors


def _open_tensors(directory: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Opens the files of a checkpoint; returns tensor name -> the open file that holds it."""
    index = directory / _INDEX
    if index.exists():
        weight_map = _read_json(index).get("weight_map", {})
        names = sorted(set(weight_map.values()))
    else:
        weight_map, names = None, [_SINGLE]
    tensors: dict[str, Any] = {}
    for name in names:
        path = directory / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        try:
            file = stack.enter_context(safe_open(path, framework="numpy"))
        except SafetensorError as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        for tensor in file.keys():  # noqa: SIM118 — not a dict
            if tensor in tensors:
                raise ValueError(f"{path}: tensor {tensor!r} is also in another file")
            tensors[tensor] = file
    for tensor in weight_map or {}:
        if tensor not in tensors:
            raise ValueError(f"{index} names tensor {tensor!r}, which no file contains")
    return tensors


def _check_names(
    expected: set[str], found: set[str], *, config: DecoderConfig, directory: Path
) -> None:
    # Two kinds of surplus are harmless: buffers in old exports that follow from the config, and the
    # second copy of a tied head, which `_check_tied_head` compares.
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if config.tied:
        ignored.add("lm_head.weight")
    for problem, names in (
        ("misses", expected - found),
        ("has surplus", found - expected - ignored),
    ):
        if names:
            shown = ", ".join(sorted(names)[:5]) + (" ..." if len(names) > 5 else "")
            raise ValueError(
                f"{directory}: a {config.model_type} checkpoint with this config.json {problem} "
                f"{len(names)} tensor(s): {shown}"
            )


def _check_tied_head(tensors: Mapping[str, Any], *, config: DecoderConfig, directory: Path) -> None:
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    if config.tied and head in tensors:
        a, b = (tensors[name].get_tensor(name).view(np.uint8) for name in (head, table))
        if not np.array_equal(a, b):
            raise ValueError(
                f"{directory}: config.json ties the head to the embedding, but {head!r} differs "
                f"from {table!r}; set tie_word_embeddings to false if the head is separate"
            )


def _read_parameter(
    one: ParamSpec, tensors: Mapping[str, Any], *, dtype: DType | None
) -> np.ndarray:
    names = one.hf_names()
    shape = one.tensor_shape
    out: np.ndarray | None = None
    for i, name in enumerate(names):
        part = tensors[name].get_slice(name)
        if tuple(part.get_shape()) != shape:
            raise ValueError(
                f"tensor {name!r} has shape {tuple(part.get_shape())}, expected {shape}"
            )
        if part.get_dtype() not in _DTYPES:
            raise ValueError(
                f"tensor {name!r} has dtype {part.get_dtype()}; supported are {', '.join(_DTYPES)}"
            )
        if out is None:
            out = np.empty((len(names), *shape), dtype or _DTYPES[part.get_dtype()])
        out[i] = tensors[name].get_tensor(name)
    assert out is not None  # a decoder has at least one layer
    return out.reshape(one.shape)


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
      source_dir: directory to copy tokenizer and generation files from.
      max_shard_bytes: largest size of a file, unless a single tensor is larger. Several files get
        an index.

    Raises:
      ValueError: if `params` are not those of `config`; the message names the parameter.
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
    shards = _plan_shards(flat, itemsize=np.dtype(dtype).itemsize, max_bytes=max_shard_bytes)
    weight_map: dict[str, str] = {}
    stream = iter(tensors)
    for i, names in enumerate(shards, start=1):
        file = _SINGLE if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        content = dict(next(stream) for _ in names)
        # transformers rejects files without this metadata.
        save_file(content, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(int(np.prod(one.shape)) for one in flat.values())
        metadata = {"total_size": total * np.dtype(dtype).itemsize}
        _write_json(directory / _INDEX, {"metadata": metadata, "weight_map": weight_map})
    content = families.to_hf_config(config, dtype=np.dtype(dtype).name)
    _write_json(directory / "config.json", content)
    # Files left by an earlier save with another number of shards would be read instead of these.
    current = {*weight_map.values(), *([_INDEX] if len(shards) > 1 else [])}
    for path in (*directory.glob("model*.safetensors"), directory / _INDEX):
        if path.name not in current:
            path.unlink(missing_ok=True)
    if source_dir is not None:
        copy_tokenizer(source_dir, directory)


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


def copy_tokenizer(source_dir: str | Path, directory: str | Path) -> None:
    """Copies tokenizer and generation files from one checkpoint to another, if they exist."""
    for name in _TOKENIZER_FILES:
        source = Path(source_dir) / name
        target = Path(directory) / name
        if source.is_file() and not (target.exists() and target.samefile(source)):
            shutil.copyfile(source, target)


def _plan_shards(
    flat: Mapping[str, ParamSpec], *, itemsize: int, max_bytes: int
) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    room = max_bytes
    for one in flat.values():
        size = itemsize * int(np.prod(one.tensor_shape))
        for name in one.hf_names():
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
    given: dict[str, Any] = traverse_util.flatten_dict(params, sep="/")  # pyright: ignore
    if unknown := sorted(set(given) ^ set(flat)):
        raise ValueError(f"parameters do not fit the config: {', '.join(unknown)}")
    for path, one in flat.items():
        if given[path].shape != one.shape:
            raise ValueError(
                f"parameter {path!r} has shape {given[path].shape}, expected {one.shape}"
            )
        value = np.asarray(given[path]).astype(dtype).reshape(-1, *one.tensor_shape)
        for name, tensor in zip(one.hf_names(), value, strict=True):
            yield name, np.ascontiguousarray(tensor)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
