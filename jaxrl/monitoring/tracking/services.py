"""Metrics on their way to Weights & Biases and to MLflow, where these are installed and asked for.

A run that goes on continues the one that it began there; its id lies in the run directory.
"""

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from jaxrl.config.tracking import TrackingConfig

Ending = Literal["finished", "stopped", "failed"]  # "stopped": by a signal or an alarm
Note = Callable[[str], None]

_REST = 10  # times as long as a failure took
_MOST_PARAMS = 100  # that MLflow takes at once; a config has more keys


class Writer(Protocol):
    """Where metrics of a step go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Of one step, once."""
        ...

    def close(self, ending: Ending) -> None:
        """Nothing is written afterwards."""
        ...


class Service:
    """A writer whose failures never end the run: the first one is said, and metrics.jsonl has every
    metric in any case.

    After a failure nothing is sent for ten times as long as it took, so that a service that does
    not answer costs a run a tenth of its time and not all of it.
    """

    def __init__(self, name: str, make: Callable[[], Writer], *, note: Note) -> None:
        self._name, self._note, self._said = name, note, False
        self._rest_until = -float("inf")
        self._writer: Writer | None = None
        self._attempt(lambda: self._open(make))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics after a step, if the service can be reached."""
        if self._writer is not None and time.monotonic() >= self._rest_until:
            writer = self._writer
            self._attempt(lambda: writer.write(step, metrics))

    def close(self, ending: Ending) -> None:
        """Tells the service how the run ended."""
        if self._writer is not None:
            writer = self._writer
            self._attempt(lambda: writer.close(ending))

    def _open(self, make: Callable[[], Writer]) -> None:
        self._writer = make()

    def _attempt(self, act: Callable[[], None]) -> None:
        begun = time.monotonic()
        try:
            act()
        except Exception as error:  # of a package that is not ours: it may be any
            now = time.monotonic()
            self._rest_until = now + _REST * (now - begun)
            if not self._said:
                self._said = True
                self._note(
                    f"tracking.{self._name} failed, and the run goes on: {error!r}. metrics.jsonl "
                    "has every metric; what this service misses is not sent again"
                )


def open_services(
    config: TrackingConfig, directory: Path, *, resolved: Mapping[str, Any], note: Note
) -> Sequence[Service]:
    """The services of a config; one that fails stays silent.

    Args:
      config: which.
      directory: of the run.
      resolved: {dotted key: value}, shown there.
      note: is told of the first failure of each.

    Raises:
      ValueError: if the package of one is not installed.
    """
    asked = [(name, kind, getattr(config, name)) for name, kind in _KINDS.items()]
    modules = {name: _import(name) for name, _, project in asked if project is not None}

    def make(name: str, kind: Any, project: str) -> Service:
        def begin() -> Writer:
            return kind(modules[name], project, directory=directory, resolved=resolved)

        return Service(name, begin, note=note)

    return [make(*one) for one in asked if one[0] in modules]


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

    def close(self, ending: Ending) -> None:
        """Sends the rest."""
        # Theirs: 255 is shown as "killed", any other but 0 as "failed".
        self._run.finish(exit_code={"finished": 0, "stopped": 255, "failed": 1}[ending])


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
        items = list(resolved.items())
        for start in range(0, len(items), _MOST_PARAMS):
            module.log_params(dict(items[start : start + _MOST_PARAMS]))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics after a step."""
        self._module.log_metrics(dict(metrics), step=step)

    def close(self, ending: Ending) -> None:
        """Ends the run."""
        statuses = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
        self._module.end_run(statuses[ending])


_KINDS = {"wandb": Wandb, "mlflow": MLflow}


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise ValueError(
            f"tracking.{name} needs the package {name}: pip install {name}, or leave the key out"
        ) from None
