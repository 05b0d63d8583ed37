"""Data for the page of a run, read from the run's directory."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.commands.report.charts import drawn
from jaxrl.commands.report.rolled_back import read_rolled_back_steps
from jaxrl.commands.report.thinning import Points, extremes, means
from jaxrl.config.alarms import LIMITS
from jaxrl.monitoring.alarms.causes import CAUSES, Cause
from jaxrl.monitoring.alarms.history import History
from jaxrl.monitoring.alarms.rules import replay_alarms
from jaxrl.monitoring.tracking.tracking import read_metrics

_MOST_SAMPLED_STEPS = 40


def collect(run_dir: Path, *, name: str) -> dict[str, Any]:
    """Collects the data for a run's page as JSON values.

    Args:
      run_dir: directory of a training run, finished or not.
      name: the run's name on the page.

    Raises:
      ValueError: if the directory has no metrics.
    """
    entries = read_metrics(run_dir / "metrics.jsonl")
    if not entries:
        raise ValueError(f"{run_dir} is not a run: its metrics.jsonl is missing or empty")
    path = run_dir / "config.toml"
    config = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    starts = read_metrics(run_dir / "starts.jsonl")
    rolled_back = read_rolled_back_steps(run_dir)
    # The alarms of discarded steps come before their rollback.
    before = {part.number: [_explained(event) for event in part.events] for part in rolled_back}
    samples = _samples(read_metrics(run_dir / "samples.jsonl"))
    for part in rolled_back:
        samples += [sample | {"rollback": part.number} for sample in _samples(part.samples)]
    return {
        "name": name,
        "path": str(run_dir),
        "config": {
            f"{table}.{key}" if key else table: value
            for table, found in config.items()
            for key, value in (found if isinstance(found, dict) else {"": found}).items()
        },
        "starts": starts,
        "last_step": max(entry["step"] for entry in entries),
        "series": _series(entries, starts),
        "rolled_back": [
            {"number": part.number, "series": _series(part.entries, starts)} for part in rolled_back
        ],
        "alarms": [
            e for one in alarms(entries) for e in (*before.get(one.get("number", 0), ()), one)
        ],
        "samples": samples,
    }


def alarms(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lists the alarms in a run's metrics, or those that a run without alarms would have raised."""
    found = [entry["event"] for entry in entries if "event" in entry]
    if not found and not any("diversity/distinct" in entry for entry in entries):
        found = [
            {**alarm._asdict(), "alarm": alarm.name, "at": alarm.step, "action": "replayed"}
            for alarm in replay_alarms(entries, LIMITS)
        ]
    return [_explained(event) for event in found]


def _explained(event: Mapping[str, Any]) -> dict[str, Any]:
    # A run by another version may have other alarms.
    cause = CAUSES.get(event["alarm"], Cause(title=event["alarm"], causes="", keys=()))
    return {**event, **cause._asdict()}


def _series(
    entries: Sequence[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]
) -> dict[str, Points]:
    """Maps each drawn metric to its curve; phase times leave out the steps that compiled."""
    history = History()
    for entry in entries:
        history.add(entry)
    columns = {name: history.series(name) for name in sorted(drawn(history.names))}
    times = {name: column for name, column in columns.items() if name.startswith("time/")}
    compiled = {start["step"] + 1 for start in starts} or {1}
    curves = {name: extremes(column) for name, column in columns.items() if name not in times}
    return curves | means(times, without=compiled)


def _samples(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    steps = sorted({entry["step"] for entry in entries})
    every = -(-len(steps) // _MOST_SAMPLED_STEPS) or 1
    # Counted from the end, so that the newest step is kept.
    chosen = {*steps[::-1][::every]}
    return [entry for entry in entries if entry["step"] in chosen]
