"""Tracking services: Weights & Biases and MLflow, if installed and configured, and Prometheus.

A resumed run continues its earlier run there; the run directory keeps the id.
"""

import functools
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxrl.config.tracking import TrackingConfig
from jaxrl.core import read_whole, write_whole

Ending = Literal["finished", "stopped", "failed"]  # "stopped": by a signal or an alarm
Note = Callable[[str], None]

_PAUSE = 10  # times as long as the failed call took
_MOST_PARAMS = 100  # per request to MLflow; a config has more keys


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
            id=_read_id(kept),
            resume="allow",
            config=dict(resolved),
        )
        write_whole(kept, self._run.id)
        # W&B's own step only rises, but resumes and rollbacks go back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics after a step."""
        self._run.log({"step": step, **metrics})

    def close(self, ending: Ending) -> None:
        """Sends the remaining metrics and the exit code."""
        # W&B shows 255 as "killed" and any other nonzero code as "failed".
        self._run.finish(exit_code={"finished": 0, "stopped": 255, "failed": 1}[ending])


class MLflow:
    """A run of MLflow, on the server that MLFLOW_TRACKING_URI names."""

    def __init__(
        self, module: Any, experiment: str, *, directory: Path, resolved: Mapping[str, Any]
    ) -> None:
        kept = directory / "mlflow_id"
        self._module = module
        module.set_experiment(experiment)
        if (known := _read_id(kept)) is not None:
            module.start_run(run_id=known)
            return
        write_whole(kept, module.start_run(run_name=directory.name).info.run_id)
        items = list(resolved.items())
        for start in range(0, len(items), _MOST_PARAMS):
            module.log_params(dict(items[start : start + _MOST_PARAMS]))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics after a step."""
        self._module.log_metrics(dict(metrics), step=step)

    def close(self, ending: Ending) -> None:
        """Sends the run's status."""
        statuses = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
        self._module.end_run(statuses[ending])


class Prometheus:
    """A page of the newest metrics, `jaxrl_metric{run="...", name="reward"} 0.5`, for Prometheus to
    read."""

    def __init__(
        self, module: Any, address: str, *, directory: Path, resolved: Mapping[str, Any]
    ) -> None:
        registry, (host, _, port) = module.CollectorRegistry(), address.rpartition(":")
        labels = ["run", "name"]
        self._metric = module.Gauge(
            "jaxrl_metric", "The newest value of a metric of a run", labels, registry=registry
        )
        self._run = directory.name
        self._server, self._thread = module.start_http_server(int(port), host, registry=registry)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the metrics after a step."""
        for name, value in {"step": step, **metrics}.items():
            self._metric.labels(self._run, name).set(value)

    def close(self, ending: Ending) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _read_id(path: Path) -> str | None:
    """Returns the id of the run at a service; None for a new run."""
    content = read_whole(path)
    if content is None:
        return None
    try:
        known = content.decode("ascii")
    except UnicodeDecodeError:
        known = ""
    if not known.isprintable() or not known.strip():
        raise ValueError(f"{path} holds {content!r}, expected an id; delete it to begin a new one")
    return known


Writer = Wandb | MLflow | Prometheus
_WRITERS: Mapping[str, Any] = {"wandb": Wandb, "mlflow": MLflow, "prometheus": Prometheus}
_PACKAGES = {"prometheus": "prometheus_client"}  # where the package has another name


class Service:
    """A writer whose failures never end the run; only the first one is reported.

    After a failure it pauses for ten times the failure's duration, so that an unresponsive service
    costs at most a tenth of the run's time.
    """

    def __init__(self, name: str, make: Callable[[], Writer], *, note: Note) -> None:
        self._name, self._note, self._failed = name, note, False
        self._paused_until = -float("inf")
        self._writer: Writer | None = self._attempt(make)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics after a step, unless paused."""
        if self._writer is not None and time.monotonic() >= self._paused_until:
            self._attempt(self._writer.write, step, metrics)

    def close(self, ending: Ending) -> None:
        """Sends the outcome of the run."""
        if self._writer is not None:
            self._attempt(self._writer.close, ending)

    def _attempt(self, function: Callable[..., Any], *arguments: Any) -> Any:
        begun = time.monotonic()
        try:
            return function(*arguments)
        except Exception as error:  # the package may raise anything
            now = time.monotonic()
            self._paused_until = now + _PAUSE * (now - begun)
            if not self._failed:
                self._failed = True
                self._note(
                    f"tracking.{self._name} failed: {error!r}. The run continues and metrics.jsonl "
                    "has every metric; metrics missed by the service are not sent again"
                )


def open_services(
    config: TrackingConfig, directory: Path, *, resolved: Mapping[str, Any], note: Note
) -> Sequence[Service]:
    """Opens the services of a config; they receive the run's config, {dotted key: value}.

    Raises:
      ValueError: if a service's package is not installed.
    """
    projects = {name: getattr(config, name) for name in _WRITERS}
    modules = {name: _import(name) for name, project in projects.items() if project is not None}
    kwargs = {"directory": directory, "resolved": resolved}
    return [
        Service(
            name, functools.partial(_WRITERS[name], module, projects[name], **kwargs), note=note
        )
        for name, module in modules.items()
    ]


def _import(name: str) -> Any:
    package = _PACKAGES.get(name, name)
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        raise ValueError(
            f"tracking.{name} needs the package {package}: pip install {package}, or remove the key"
        ) from None
