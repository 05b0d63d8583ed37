"""Writes the trained model of a run."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jaxrl.bridge.source import ParamsSource
from jaxrl.builders.learner import Learning
from jaxrl.config.training import Config
from jaxrl.core.hosts import Hosts
from jaxrl.models import huggingface, lora, peft
from jaxrl.models.spec import Params
from jaxrl.monitoring.tracking.plots import draw_run
from jaxrl.monitoring.tracking.tracking import read_metrics
from sharding.transfer import fetch


def export(config: Config, learning: Learning, *, params: Params, hosts: Hosts) -> Path:
    """Writes the model as a Hugging Face checkpoint, with its served weights, and draws the curves.
    Adapters are merged into the model, and also written by themselves.

    Returns the model's directory, on every process once it is complete."""
    directory, policy, base = Path(config.run_dir), config.policy, config.model.path
    model = learning.model
    tensors = ParamsSource(lora.merge(params), model.specs, dtype=policy.exported)
    adapters = fetch(params.adapters) if isinstance(params, lora.Adapted) else None

    def write(tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        huggingface.save_tensors(
            directory / "model", tensors, model.config, dtype=policy.exported, source_dir=base
        )
        if adapters is not None:
            peft.save(
                directory / "adapter",
                adapters,
                specs=learning.specs,
                base=base,
                dtype=policy.params,
            )
        draw_run(read_metrics(directory / "metrics.jsonl"), directory / "curves.png")

    hosts.consume_on_leader(tensors, write)
    return hosts.share(directory / "model")  # returns only once it is written
