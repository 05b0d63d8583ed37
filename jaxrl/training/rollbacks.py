"""Rollbacks of a run: a return to an old checkpoint with a changed config.

`rollbacks.json` in the run directory lists them. `decide` writes a rollback there and `settle`
carries it out when the run is opened again, also after a kill. config.toml then holds the changed
config; a resumed run may give the changed keys with their old or their new values.
"""

import inspect
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from jaxrl.builders.recipe import make_recipe
from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.core import load_function, read_whole, write_whole
from jaxrl.diagnostics import Alarm
from jaxrl.losses import recipes
from jaxrl.tracking.tracker import read_metrics, write_lines
from jaxrl.training.run_directory import ResumeError

_FIRST_KL = 0.001  # for a loss without a KL term: enough for long runs (docs/reference/recipes.md)


class Rollback(NamedTuple):
    """One rollback."""

    alarm: str  # name of the alarm
    at: int  # step after which it was raised
    to: int  # step of the checkpoint to return to, 0 for the beginning
    text: str  # message of the alarm
    # {key of the config: [old value, new value]}.
    changes: dict[str, Annotated[list[Any], Field(min_length=2, max_length=2)]]
    value: float  # measured
    limit: float  # that the value crossed
    done: bool = False  # true once it is carried out

    @property
    def new(self) -> dict[str, Any]:
        """{key: new value}."""
        return {key: value for key, (_, value) in self.changes.items()}

    @property
    def in_words(self) -> str:
        """The changes in words, such as "loss.kl 0.1 -> 0.2"."""
        return ", ".join(f"{k} {old!r} -> {new!r}" for k, (old, new) in self.changes.items())


_FILE = TypeAdapter(list[Rollback])


def remedy(action: str, config: Config) -> dict[str, Any]:
    """Returns the keys that a `jaxrl.config.alarms.Action` changes, with new values.

    Raises:
      ValueError: if the config cannot have these values, or has them already.
    """
    if action == "rollback_precision":
        assert config.alarms.precision is not None, "the config requires it"
        if config.alarms.precision == config.precision:
            raise ValueError(f"precision = {config.precision.text!r} is alarms.precision already")
        changes: dict[str, Any] = {"precision": config.alarms.precision.text}
    elif action == "rollback_learning_rate":
        changes = {"optimizer.learning_rate": config.optimizer.learning_rate / 2}
    elif config.reward.kl:
        changes = {"reward.kl": 2 * config.reward.kl}
    else:
        changes = {"loss.kl": 2 * _kl(config) or _FIRST_KL}
    make_recipe(changed(config, changes))
    return changes


def target(config: Config, checkpoints: Path, *, healthy: int) -> int | None:
    """Returns the step of the last checkpoint up to `healthy`; 0 if none was due, None if lost."""
    steps = [int(p.name) for p in checkpoints.iterdir() if p.name.isdigit()]
    before = [step for step in steps if step <= healthy]
    due = [every for every in (config.checkpoint.every, config.eval_every) if every]
    if before:
        return max(before)
    return 0 if healthy < min(due) else None


def decide(
    directory: Path, alarm: Alarm, *, to: int, config: Config, changes: Mapping[str, Any]
) -> Rollback:
    """Records the decision to return to the step `to` with the changes."""
    old = toml_file.flatten(config)
    pairs = {key: [old.get(key), new] for key, new in changes.items()}
    decided = Rollback(
        alarm.name, alarm.step, to, alarm.text, pairs, value=alarm.value, limit=alarm.limit
    )
    _write(directory, [*read(directory), decided])
    return decided


def read(directory: Path) -> list[Rollback]:
    """Reads the rollbacks of the run in a directory, the oldest first.

    Raises:
      ResumeError: for a file that is missing or damaged.
    """
    path = directory / "rollbacks.json"
    advice = (
        'Recreate it from the lines of metrics.jsonl with "action": "rollback", or choose '
        "another run_dir"
    )
    try:
        content = read_whole(path)
        if content is not None:
            return _FILE.validate_python(json.loads(content))
    except (ValueError, RecursionError) as error:
        raise ResumeError(f"{path} is not a list of rollbacks: {error}. {advice}") from None
    if carried_out := sorted(directory.glob("rolled_back_*.jsonl")):
        raise ResumeError(f"{path} is missing, but {carried_out[-1].name} is there. {advice}")
    return []


def settle(directory: Path, config: Config) -> Config:
    """Carries out a decided rollback; returns the config with the changes of all rollbacks.

    Metrics after the checkpoint move to `rolled_back_N.jsonl`, samples and judgements to
    `rolled_back_N_samples.jsonl` and `rolled_back_N_judge.jsonl`. Without checkpoints, files of
    old rollbacks are removed.

    Raises:
      ResumeError: if a changed key has a value that the run never had, or rollbacks cannot be read
        or carried out.
    """
    if not (directory / "checkpoints").exists():
        for path in (directory / "rollbacks.json", *directory.glob("rolled_back_*.jsonl")):
            path.unlink(missing_ok=True)
    found = read(directory)
    if found and not found[-1].done:
        last = found[-1]
        if last.to and not (directory / "checkpoints" / str(last.to)).is_dir():
            raise ResumeError(
                f"{directory}/rollbacks.json: the rollback returns to step {last.to}, but there is "
                "no such checkpoint; put it back, or choose another run_dir"
            )
        _remove_steps(directory, last, number=len(found))
        path = directory / "config.toml"
        if path.exists():
            there = changed(toml_file.load(Config, file=path), last.new)
            write_whole(path, toml_file.dumps(there))
        found = [*found[:-1], last._replace(done=True)]
        _write(directory, found)
    _check_known(config, found)
    for rollback in found:
        config = changed(config, rollback.new)
    return config


def scale_coefficients(
    coefficients: dict[str, float], found: Sequence[Rollback], *, step: int
) -> None:
    """Changes the coefficient that `loss.kl_target` steers, as it was at the checkpoint of a step,
    by the factor by which later rollbacks changed `loss.kl`, where it started."""
    for rollback in found:
        old, new = rollback.changes.get("loss.kl", (None, None))
        if old and step <= rollback.to and "kl" in coefficients:
            coefficients["kl"] *= new / old


def _remove_steps(directory: Path, last: Rollback, *, number: int) -> None:
    """Removes the steps after `last.to` from metrics, samples, judgements and checkpoints."""
    for name in ("samples", "judge"):
        path = directory / f"{name}.jsonl"
        kept = _move_steps(path, directory / f"rolled_back_{number}_{name}.jsonl", after=last.to)
        if path.exists():
            write_lines(path, kept)
    entries = read_metrics(directory / "metrics.jsonl")
    kept = _move_steps(
        directory / "metrics.jsonl", directory / f"rolled_back_{number}.jsonl", after=last.to
    )
    event = {"action": "rollback", "number": number, **last._replace(done=True)._asdict()}
    kept = [e for e in kept if e.get("event", {}).get("number") != number]
    # The changes of earlier rollbacks stay, even if this one goes back further.
    later = (e for e in entries if e["step"] > last.to)
    kept += [e | {"step": last.to} for e in later if e.get("event", {}).get("number")]
    time = entries[-1].get("time", 0.0) if entries else 0.0
    kept.append({"step": last.to, "time": time, "event": event})
    write_lines(directory / "metrics.jsonl", kept)
    for path in (directory / "checkpoints").iterdir():
        if path.name.isdigit() and int(path.name) > last.to:
            shutil.rmtree(path)


def _move_steps(path: Path, rolled_back: Path, *, after: int) -> list[dict[str, Any]]:
    """Copies later entries to the file `rolled_back` unless it exists; returns the others."""
    entries = read_metrics(path)
    later = [entry for entry in entries if entry["step"] > after]
    if later and not rolled_back.exists():
        write_lines(rolled_back, later)
    return [entry for entry in entries if entry["step"] <= after]


def _check_known(config: Config, found: Sequence[Rollback]) -> None:
    asked = toml_file.flatten(config)
    for key in sorted({key for rollback in found for key in rollback.changes}):
        known = [value for rollback in found for value in rollback.changes.get(key, ())]
        if asked.get(key) not in known:
            raise ResumeError(
                f"{key} = {asked.get(key)!r}, but rollbacks of the run changed it from "
                f"{known[0]!r} to {known[-1]!r}; give one of these, or choose another run_dir"
            )


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Returns the config with new values of some keys; raises ConfigError for invalid ones."""
    tree = config.model_dump()
    for key, value in changes.items():
        table, _, leaf = key.rpartition(".")
        (tree[table] if table else tree)[leaf] = value
    return toml_file.validate(Config, tree)


def _kl(config: Config) -> float:
    """Returns the KL coefficient of the loss: the config's, or the default of the recipe."""
    if "kl" in config.loss.parameters:
        return float(config.loss.parameters["kl"])
    recipe = load_function(config.loss.name, builtin=recipes, key="loss.name")
    declared = inspect.signature(recipe).parameters.get("kl")
    return float(declared.default) if declared and declared.default != declared.empty else 0.0


def _write(directory: Path, rollbacks: list[Rollback]) -> None:
    text = json.dumps([r._asdict() for r in rollbacks], indent=1)
    write_whole(directory / "rollbacks.json", text)
