"""Writes the trained model of a run."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl import huggingface
from jaxrl.bridge import ParamsSource
from jaxrl.builders.learner import Learning
from jaxrl.config.bucket import local_directory
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.config.training import Config
from jaxrl.core import DType, Hosts
from jaxrl.huggingface import Checkpoint, save_adapter
from jaxrl.models import Model, Params, lora
from jaxrl.sharding import fetch
from jaxrl.tracking.plots import draw_run
from jaxrl.tracking.tracker import read_metrics


def export(
    config: Config, learning: Learning, *, source: Checkpoint, params: Params, hosts: Hosts
) -> Path:
    """Writes the model of a training run and draws its curves; returns the model's directory."""
    model = write_model(
        config, params, source=source, model=learning.model, specs=learning.specs, hosts=hosts
    )

    def draw() -> None:
        directory = local_directory(config.run_dir)
        draw_run(read_metrics(directory / "metrics.jsonl"), directory / "curves.png")

    hosts.on_leader(draw)
    return model


def model_dtype(config: Config | SupervisedConfig, source: Checkpoint) -> DType:
    """Returns the dtype of a run's model: as served; if supervised without lora the 16 bits of the
    model that it started from, or else as trained."""
    if not isinstance(config, SupervisedConfig) or config.lora.rank:
        return config.precision.exported
    return source.dtype or config.precision.params


def write_model(
    config: Config | SupervisedConfig,
    params: Any,
    *,
    source: Checkpoint,
    model: Model,
    specs: Any,
    hosts: Hosts,
) -> Path:
    """Writes a run's model to `model` in its directory as a Hugging Face checkpoint, in
    `model_dtype`. All processes must call it. `source` is the checkpoint that the run started from.

    Adapters are merged into the model, and also written to `adapter` in their own dtype.

    Returns:
      The model's directory, on every process once it is complete.
    """
    directory, dtype = local_directory(config.run_dir), model_dtype(config, source)
    tensors = ParamsSource(lora.merge(params), model.specs, dtype=dtype)
    adapters = fetch(params.adapters) if isinstance(params, lora.Adapted) else None

    def write(tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        huggingface.save_tensors(
            directory / "model", tensors, model.config, dtype=dtype, source=source
        )
        if adapters is not None:
            own, base = jax.tree.leaves(adapters)[0].dtype, str(source.directory)
            save_adapter(directory / "adapter", adapters, specs=specs, base=base, dtype=own)

    hosts.consume_on_leader(tensors, write)
    return hosts.share(directory / "model")  # returns only once it is written
