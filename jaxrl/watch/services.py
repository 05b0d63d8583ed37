"""Metrics on their way to Weights & Biases and to MLflow, where these are installed and asked for.

A run that goes on continues the one that it began there; its id lies in the run directory.
"""

import importlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from jaxrl.config.tracking import TrackingConfig


class Writer(Protocol):
    """Where metrics of a step go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Of one step, once."""
        ...

    def close(self) -> None:
        """Nothing is written afterwards."""
        ...


def open_services(
    config: TrackingConfig, directory: Path, *, resolved: Mapping[str, Any]
) -> list[Writer]:
    """The services of a config.

    Args:
      config: which.
      directory: of the run.
      resolved: {dotted key: value}, shown there.

    Raises:
      ValueError: if the package of one is not installed.
    """
    with ExitStack() as stack:
        writers: list[Writer] = []
        for name, kind in (("wandb", Wandb), ("mlflow", MLflow)):
            if (project := getattr(config, name)) is not None:
                module = _import(name)
                writers.append(kind(module, project, directory=directory, resolved=resolved))
                stack.callback(writers[-1].close)
        stack.pop_all()
        return writers


class Wandb:
    """A run of Weights & Biases."""

    def __init__(
        self, module: Any, project: str, *, directory: Path, resolved: Mapping[str, Any]
    ) -> None:
        kept = directory / "wandb_id"
        self._run = module.init(
            project=project,
            name=directory.name,
            dir=str(directory),
            id=kept.read_text() if kept.exists() else None,
            resume="allow",
            config=dict(resolved),
        )
        kept.write_text(self._run.id)
        # Their own count of steps only rises, and a run that is resumed or rolled back goes back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics after a step."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Sends the rest."""
        self._run.finish()


class MLflow:
    """A run of MLflow; where it goes is MLflow's own setting, MLFLOW_TRACKING_URI."""

    def __init__(
        self, module: Any, experiment: str, *, directory: Path, resolved: Mapping[str, Any]
    ) -> None:
        kept = directory / "mlflow_id"
        self._module = module
        module.set_experiment(experiment)
        if kept.exists():
            module.start_run(run_id=kept.read_text())
            return
        kept.write_text(module.start_run(run_name=directory.name).info.run_id)
        module.log_params(dict(resolved))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics after a step."""
        self._module.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        """Ends the run."""
        self._module.end_run()


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise ValueError(
            f"tracking.{name} needs the package {name}: pip install {name}, or leave the key out"
        ) from None
