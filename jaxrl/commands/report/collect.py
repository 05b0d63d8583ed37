"""Data for the page of a run, read from the run's directory."""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.commands.paths import config_of
from jaxrl.commands.report.charts import drawn
from jaxrl.config.toml_file import read_tree
from jaxrl.diagnostics import RULES, Cause, History, Series
from jaxrl.tracking.tracker import read_metrics

_MOST_SAMPLED_STEPS = 40
_MOST_POINTS = 2000  # of a curve, so that the page of a 10,000-step run stays small

Points = list[list[float]]  # [steps, values]


def collect(run_dir: Path, *, name: str) -> dict[str, Any]:
    """Collects the data for the page of a run, finished or not, as JSON values.

    Raises:
      ValueError: if the directory has no metrics.
    """
    entries = read_metrics(run_dir / "metrics.jsonl")
    if not entries:
        raise ValueError(
            f"{config_of(run_dir).parent} has no step yet: its metrics.jsonl is missing or empty; "
            "`jaxrl report --follow` and `jaxrl watch` wait for the first one"
        )
    path = run_dir / "config.toml"
    config = read_tree(path) if path.exists() else {}
    starts = read_metrics(run_dir / "starts.jsonl")
    logged = read_metrics(run_dir / "samples.jsonl")
    samples = _samples([entry for entry in logged if not entry.get("held_out")])
    discarded, alarms_before = [], dict[int, list[dict[str, Any]]]()
    for number in _rollbacks(run_dir):
        steps = read_metrics(run_dir / f"rolled_back_{number}.jsonl")
        discarded.append({"number": number, "series": _series(steps, starts)})
        events = (e["event"] | {"rollback": number} for e in steps if "event" in e)
        # The run's own metrics have the alarm that caused the rollback.
        alarms_before[number] = [_explained(e) for e in events if e["action"] != "rollback"]
        found = read_metrics(run_dir / f"rolled_back_{number}_samples.jsonl")
        found = _samples([entry for entry in found if not entry.get("held_out")])
        samples += [sample | {"rollback": number} for sample in found]
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
        "seconds": sum(entry.get("time/step") or 0.0 for entry in entries),
        "series": _series(entries, starts),
        "rolled_back": discarded,
        "alarms": [
            event
            for alarm in alarms(entries)
            for event in (*alarms_before.get(alarm.get("number", 0), ()), alarm)
        ],
        "samples": samples,
        "held_out": _samples([entry for entry in logged if entry.get("held_out")]),
    }


def _rollbacks(run_dir: Path) -> list[int]:
    """Returns the numbers of a run's rollbacks, from 1."""
    names = (re.fullmatch(r"rolled_back_(\d+)\.jsonl", path.name) for path in run_dir.iterdir())
    return sorted(int(found[1]) for found in names if found)


def alarms(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lists the alarms in a run's metrics."""
    return [_explained(entry["event"]) for entry in entries if "event" in entry]


def _explained(event: Mapping[str, Any]) -> dict[str, Any]:
    # A run by another version may have other alarms.
    name = event["alarm"]
    known = RULES[name].cause if name in RULES else Cause(name, condition="", causes="", keys=())
    return {**event, **known._asdict()}


def _series(
    entries: Sequence[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]
) -> dict[str, Points]:
    """Maps each drawn metric to its curve; phase times leave out the steps that compiled."""
    history = History(entries)
    columns = {name: history.series(name) for name in sorted(drawn(history.names))}
    times = {name: column for name, column in columns.items() if name.startswith("time/")}
    compiled = {start["step"] + 1 for start in starts} or {1}
    rewarded = len(columns["reward"].values) if "reward" in columns else 0
    for name in ("groups/right", "groups/mixed", "groups/wrong"):
        # Rewards of some steps alone happened to be 0 and 1.
        if name in columns and len(columns[name].values) < rewarded:
            del columns[name]
    curves = {name: extremes(column) for name, column in columns.items() if name not in times}
    return curves | _means(times, without=compiled)


def extremes(column: Series) -> Points:
    """Thins a curve to at most 2,000 points: the lowest and highest of each stretch."""
    steps, values = column
    if len(values) > _MOST_POINTS:
        size = -(-2 * len(values) // _MOST_POINTS)
        kept = set[int]()
        for start in range(0, len(values), size):
            stretch = range(start, min(start + size, len(values)))
            kept |= {min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
        order = sorted(kept)
        steps, values = [steps[i] for i in order], [values[i] for i in order]
    return [[float(s) for s in steps], [_short(value) for value in values]]


def _means(columns: Mapping[str, Series], *, without: Collection[int]) -> dict[str, Points]:
    """Thins stacked curves, {name: curve}, to at most 2,000 points each.

    A point is the mean over a stretch of steps, the same for all curves, at its middle step. A
    missing value counts as 0. Steps in `without` are left out.
    """
    found = {name: dict(zip(*column, strict=True)) for name, column in columns.items()}
    steps = sorted({step for values in found.values() for step in values} - set(without))
    size = -(-len(steps) // _MOST_POINTS) or 1
    stretches = [steps[start : start + size] for start in range(0, len(steps), size)]
    middles = [float(stretch[len(stretch) // 2]) for stretch in stretches]
    return {
        name: [
            middles,
            [_short(sum(values.get(s, 0.0) for s in some) / len(some)) for some in stretches],
        ]
        for name, values in found.items()
        if middles
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _samples(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    steps = sorted({entry["step"] for entry in entries})
    every = -(-len(steps) // _MOST_SAMPLED_STEPS) or 1
    # Counted from the end, so that the newest step is kept; the first one is the beginning.
    chosen = {*steps[::-1][::every], *steps[:1]}
    return [entry for entry in entries if entry["step"] in chosen]
