"""Tensors of a checkpoint directory that the decoder does not compute with."""

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from jaxrl.huggingface.checkpoint import Checkpoint
from jaxrl.huggingface.files import INDEX, SINGLE, Tensor
from jaxrl.huggingface.tensors.names import open_joined, unused_prefixes
from jaxrl.models import spec
from jaxrl.models.families import DecoderConfig
from jaxrl.models.parameters import param_specs

# Keys of config.json about layers for multi-token prediction.
_PREDICTION = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")


@contextlib.contextmanager
def unused_tensors(source: Checkpoint | None, config: DecoderConfig) -> Iterator[dict[str, Tensor]]:
    """Opens the tensors that the decoder does not use: layers for multi-token prediction, and the
    part that reads images.

    Yields none for a reward model, without a checkpoint, or if the checkpoint has no weights or
    another config.json.
    """
    if source is None or config.scored or not _has_model(source, config):
        yield {}
        return
    flat = spec.flatten(param_specs(config))
    with contextlib.ExitStack() as stack:
        tensors = open_joined(source.directory, flat, stack, block=source.block)
        unused = unused_prefixes(config)
        yield {name: one for name, one in tensors.items() if name.startswith(unused)}


def with_unused(
    content: dict[str, Any],
    source: Checkpoint | None,
    config: DecoderConfig,
    *,
    unused: Collection[str],
) -> dict[str, Any]:
    """Adds a checkpoint's keys about `unused_tensors` to the content of another config.json.

    Raises:
      ValueError: if the model is wrapped and the checkpoint does not have it.
    """
    wrapped = config.wrapped
    if source is None or not (unused or (wrapped and _has_model(source, config))):
        if wrapped:
            raise ValueError(
                f"{source and source.directory} does not have the {config.model_type} model of "
                "images and text that is being written; name the directory it was read from"
            )
        return content
    raw = source.content
    read = raw["text_config"] if wrapped else raw
    keys = {key: read[key] for key in _PREDICTION if key in read and unused}
    if not wrapped:
        return content | keys
    around = {key: value for key, value in raw.items() if key != "quantization_config"}
    return around | content | {"text_config": content["text_config"] | keys}


def _has_model(source: Checkpoint, config: DecoderConfig) -> bool:
    if not (source.directory / "config.json").exists():
        return False
    weights = any((source.directory / name).exists() for name in (SINGLE, INDEX))
    return weights and source.config == config
