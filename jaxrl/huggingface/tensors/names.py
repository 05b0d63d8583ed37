"""Tensors of a checkpoint directory by their names: those of the decoder, and those beside it."""

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.huggingface.config import convert
from jaxrl.huggingface.config.quantization import read_block
from jaxrl.huggingface.files import INDEX, SINGLE, Tensor, named, open_weights, read_object
from jaxrl.huggingface.tensors.fp8 import join_scaled
from jaxrl.huggingface.tensors.joint_experts import split_experts
from jaxrl.huggingface.tensors.mxfp4 import join_packed
from jaxrl.models import spec
from jaxrl.models.families import FAMILIES, DecoderConfig
from jaxrl.models.parameters import param_specs
from jaxrl.models.spec import ParamSpec

# Of config.json: layers for multi-token prediction.
_PREDICTION = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")


@contextlib.contextmanager
def checked_tensors(directory: Path, config: DecoderConfig) -> Iterator[dict[str, Tensor]]:
    """Opens a checkpoint as `open_weights`; checks that its names are those of the decoder.

    Tensors in MXFP4 and FP8 are joined with their scales.
    """
    flat = spec.flatten(param_specs(config))
    with contextlib.ExitStack() as stack:
        tensors = _open_joined(directory, flat, stack)
        count = sum(math.prod(one.shape[: one.stacked]) for one in flat.values())
        if count > 2 * len(tensors) + 10_000:  # too many names to list
            raise ValueError(
                f"{directory}: config.json describes {count} tensors, but the files hold "
                f"{len(tensors)}"
            )
        expected = {name for one in flat.values() for name in one.hf_names()}
        _check_names(expected, set(tensors), config=config, directory=directory)
        _check_tied_head(tensors, config=config, directory=directory)
        yield tensors


def _check_names(
    expected: set[str], found: set[str], *, config: DecoderConfig, directory: Path
) -> None:
    # Some surplus is harmless: buffers in old exports that follow from the config, the second copy
    # of a tied head, which `_check_tied_head` compares, and what `unused_tensors` keeps.
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if config.tied:
        ignored.add("lm_head.weight")
    ignored |= {name for name in found if name.startswith(_unused(config))}
    for problem, names in (
        ("misses", expected - found),
        ("has surplus", found - expected - ignored),
    ):
        if names:
            some = ", ".join(sorted(names)[:5]) + (" ..." if len(names) > 5 else "")
            raise ValueError(
                f"{directory}: a {config.model_type} checkpoint with this config.json {problem} "
                f"{len(names)} tensor(s): {some}"
            )


def _check_tied_head(
    tensors: Mapping[str, Tensor], *, config: DecoderConfig, directory: Path
) -> None:
    head, table = "lm_head.weight", param_specs(config)["embed"].name
    if config.tied and head in tensors:
        a, b = (tensors[name].read().ravel().view(np.uint8) for name in (head, table))
        if not np.array_equal(a, b):
            raise ValueError(
                f"{directory}: config.json ties the head to the embedding, but {head!r} differs "
                f"from {table!r}; set tie_word_embeddings to false if the head is separate"
            )


@contextlib.contextmanager
def unused_tensors(
    directory: str | Path | None, config: DecoderConfig
) -> Iterator[dict[str, Tensor]]:
    """Opens the tensors that the decoder does not compute with: layers for multi-token prediction,
    and those that read images.

    There are none without a directory, in a directory without weights or with another config.json,
    and in a reward model.
    """
    if directory is None or config.scored or not _has_model(Path(directory), config):
        yield {}
        return
    flat = spec.flatten(param_specs(config))
    with contextlib.ExitStack() as stack:
        tensors = _open_joined(Path(directory), flat, stack)
        yield {name: one for name, one in tensors.items() if name.startswith(_unused(config))}


def with_unused(
    content: dict[str, Any],
    directory: str | Path | None,
    config: DecoderConfig,
    *,
    unused: Collection[str],
) -> dict[str, Any]:
    """Adds what the config.json of a directory says of `unused_tensors` to the content of another.

    Raises:
      ValueError: if the model is wrapped and the directory does not have it.
    """
    wrapped = config.wrapped
    if directory is None or not (unused or (wrapped and _has_model(Path(directory), config))):
        if wrapped:
            raise ValueError(
                f"{directory} does not have the {config.model_type} model of images and text that "
                "is to be written; name the directory that it was read from"
            )
        return content
    raw = read_object(Path(directory) / "config.json")
    read = raw["text_config"] if wrapped else raw
    keys = {key: read[key] for key in _PREDICTION if key in read and unused}
    if not wrapped:
        return content | keys
    around = {key: value for key, value in raw.items() if key != "quantization_config"}
    return around | content | {"text_config": content["text_config"] | keys}


def _has_model(directory: Path, config: DecoderConfig) -> bool:
    path = directory / "config.json"
    if not path.exists() or not any((directory / name).exists() for name in (SINGLE, INDEX)):
        return False
    raw = read_object(path)
    with named(path):
        return convert.from_hf_config(raw) == config


def _unused(config: DecoderConfig) -> tuple[str, ...]:
    """Returns how the names of tensors begin that the decoder does not compute with."""
    more = FAMILIES[config.model_type].more_layers
    prediction = (f"model.layers.{config.num_layers}.", "mtp.") if more else ()
    return (*prediction, "model.visual.") if config.wrapped else prediction


def _open_joined(
    directory: Path, flat: Mapping[str, ParamSpec], stack: contextlib.ExitStack
) -> dict[str, Tensor]:
    """Opens a checkpoint as `open_weights`, with scales joined to their tensors, and a tensor for
    each expert that has a place in `flat`."""
    packable = (name for one in flat.values() if one.transposed for name in one.hf_names())
    tensors = join_packed(open_weights(directory, stack), packable)
    tensors = split_experts(tensors, flat.values())
    path = directory / "config.json"
    with named(path):
        block = read_block(read_object(path))
    return tensors if block is None else join_scaled(tensors, block=block)
