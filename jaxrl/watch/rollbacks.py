"""Rollbacks of a run: back to an old checkpoint, and on from there with a changed config.

`rollbacks.json` in the run directory holds all of them. A rollback is decided by writing it there
(`decide`) and carried out when the run is opened again (`settle`), so that a program that is killed
in between carries it out when it is started again.
"""

import inspect
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flax import traverse_util

from jaxrl import parts, plugins
from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.diagnostics.alarms import Alarm
from jaxrl.losses import recipes
from jaxrl.watch.tracking import read_metrics, write_lines

_FIRST_KL = 0.001  # where there was none: enough for long runs (docs/losses.md)


class Rollback(NamedTuple):
    """One rollback.

    Attributes:
      alarm: its name.
      at: step after which it was raised.
      to: step of the checkpoint that is gone back to, 0 for the beginning.
      text: what the alarm said.
      changes: {key of the config: [value before, value from now on]}.
      done: whether it was carried out.
    """

    alarm: str
    at: int
    to: int
    text: str
    changes: dict[str, list[Any]]
    done: bool = False


def remedy(action: str, config: Config) -> dict[str, Any]:
    """The keys that an action of `jaxrl.config.alarms.Action` changes, and their new values.

    Raises:
      ValueError: if the config cannot have them.
    """
    if action == "rollback_precision":
        changes: dict[str, Any] = {"precision": config.alarms.precision}
    elif action == "rollback_learning_rate":
        changes = {"optimizer.learning_rate": config.optimizer.learning_rate / 2}
    elif config.reward.kl:
        changes = {"reward.kl": 2 * config.reward.kl}
    else:
        changes = {"loss.kl": 2 * _kl(config) or _FIRST_KL}
    parts.make_recipe(_changed(config, changes))
    return changes


def target(config: Config, checkpoints: Path, *, healthy: int) -> int | None:
    """The step to go back to: of the newest checkpoint up to the step `healthy`; 0 if none was due
    by then; None if it is gone."""
    steps = [int(p.name) for p in checkpoints.iterdir() if p.name.isdigit()]
    before = [step for step in steps if step <= healthy]
    due = [every for every in (config.checkpoint.every, config.eval.every) if every]
    if before:
        return max(before)
    return 0 if healthy < min(due) else None


def decide(directory: Path, alarm: Alarm, *, to: int, config: Config, action: str) -> Rollback:
    """Writes down that the run goes back.

    Raises:
      ValueError: as `remedy`.
    """
    old = traverse_util.flatten_dict(config.model_dump(), sep=".")
    changes = {k: [old.get(k), new] for k, new in remedy(action, config).items()}
    decided = Rollback(alarm.name, alarm.step, to, alarm.text, changes)
    _write(directory, [*read(directory), decided])
    return decided


def read(directory: Path) -> list[Rollback]:
    """The rollbacks of the run in a directory, the oldest first."""
    path = directory / "rollbacks.json"
    if not path.exists() or not (directory / "checkpoints").exists():
        return []
    return [Rollback(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]


def settle(directory: Path, config: Config) -> Config:
    """Carries out what was decided and is not done; returns the config with all changes.

    What the run had logged after the checkpoint is moved to `rolled_back_N.jsonl`.
    """
    found = read(directory)
    if found and not found[-1].done:
        last, number = found[-1], len(found)
        entries = read_metrics(directory / "metrics.jsonl")
        undone = directory / f"rolled_back_{number}.jsonl"
        if not undone.exists():
            write_lines(undone, [e for e in entries if e["step"] > last.to])
        event = {"action": "rollback", "number": number, **last._replace(done=True)._asdict()}
        kept = [
            e
            for e in entries
            if e["step"] <= last.to and e.get("event", {}).get("number") != number
        ]
        time = entries[-1]["time"] if entries else 0.0
        write_lines(
            directory / "metrics.jsonl", [*kept, {"step": last.to, "time": time, "event": event}]
        )
        for path in (directory / "checkpoints").iterdir():
            if path.name.isdigit() and int(path.name) > last.to:
                shutil.rmtree(path)
        found = [*found[:-1], last._replace(done=True)]
        _write(directory, found)
    for rollback in found:
        config = _changed(config, {key: new for key, (_, new) in rollback.changes.items()})
    return config


def needs_new_loss_scale(directory: Path, *, step: int) -> bool:
    """Whether the checkpoint of a step was written in another precision than the run has now."""
    return any(r.to == step and "precision" in r.changes for r in read(directory)[-1:])


def _changed(config: Config, changes: Mapping[str, Any]) -> Config:
    tree = config.model_dump()
    for key, value in changes.items():
        table, _, leaf = key.rpartition(".")
        (tree[table] if table else tree)[leaf] = value
    return toml_file.validate(Config, tree)


def _kl(config: Config) -> float:
    """The KL coefficient of the loss, by the recipe's default if the config does not say it."""
    if "kl" in config.loss.parameters:
        return float(config.loss.parameters["kl"])
    recipe = plugins.load_function(config.loss.name, builtin=recipes, key="loss.name")
    declared = inspect.signature(recipe).parameters.get("kl")
    return float(declared.default) if declared and declared.default != declared.empty else 0.0


def _write(directory: Path, rollbacks: list[Rollback]) -> None:
    path = directory / "rollbacks.json"
    new = path.with_suffix(".new")
    new.write_text(json.dumps([r._asdict() for r in rollbacks], indent=1), encoding="utf-8")
    new.replace(path)
