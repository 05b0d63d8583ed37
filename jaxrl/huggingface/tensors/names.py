"""Tensors of a checkpoint directory by their names."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxrl.huggingface.config.quantization import Block
from jaxrl.huggingface.files import Tensor, open_weights
from jaxrl.huggingface.tensors.fp8 import join_scaled
from jaxrl.huggingface.tensors.joint_experts import split_experts
from jaxrl.huggingface.tensors.mxfp4 import join_packed
from jaxrl.models import spec
from jaxrl.models.families import FAMILIES, DecoderConfig
from jaxrl.models.parameters import param_specs
from jaxrl.models.spec import ParamSpec


@contextlib.contextmanager
def checked_tensors(
    directory: Path, config: DecoderConfig, *, block: Block | None
) -> Iterator[dict[str, Tensor]]:
    """Opens a checkpoint as `open_joined`; checks its names against the decoder's."""
    flat = spec.flatten(param_specs(config))
    with contextlib.ExitStack() as stack:
        tensors = open_joined(directory, flat, stack, block=block)
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
    # of a tied head, which `_check_tied_head` compares, and `unused_tensors`.
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if config.tied:
        ignored.add("lm_head.weight")
    ignored |= {name for name in found if name.startswith(unused_prefixes(config))}
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


def unused_prefixes(config: DecoderConfig) -> tuple[str, ...]:
    """Returns the prefixes of tensors that the decoder does not use."""
    more = FAMILIES[config.model_type].more_layers
    prediction = (f"model.layers.{config.num_layers}.", "mtp.") if more else ()
    return (*prediction, "model.visual.") if config.wrapped else prediction


def open_joined(
    directory: Path,
    flat: Mapping[str, ParamSpec],
    stack: contextlib.ExitStack,
    *,
    block: Block | None,
) -> dict[str, Tensor]:
    """Opens a checkpoint as `open_weights`. Joins tensors in MXFP4, and in FP8 with blocks of this
    size, with their scales, and splits joint tensors into the experts of `flat`."""
    packable = (name for one in flat.values() if one.transposed for name in one.hf_names())
    tensors = join_packed(open_weights(directory, stack), packable)
    tensors = split_experts(tensors, flat.values())
    return tensors if block is None else join_scaled(tensors, block=block)
