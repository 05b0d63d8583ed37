"""What the page of a run shows, read from the run's directory."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.commands.report.charts import drawn
from jaxrl.commands.report.thinning import Points, extremes, means
from jaxrl.commands.report.undone import Undone, read_undone
from jaxrl.config.alarms import LIMITS
from jaxrl.monitoring.alarms.causes import CAUSES, Cause
from jaxrl.monitoring.alarms.history import History
from jaxrl.monitoring.alarms.rules import replay_alarms
from jaxrl.monitoring.tracking.tracking import read_metrics

_MOST_SAMPLED_STEPS = 40


def collect(run_dir: Path, *, name: str) -> dict[str, Any]:
    """Everything that the page shows of a run, as JSON can hold it.

    Args:
      run_dir: of a training run, which may be going on.
      name: what the page calls it.

    Raises:
      ValueError: if the directory holds no metrics of a run.
    """
    entries = read_metrics(run_dir / "metrics.jsonl")
    if not entries:
        raise ValueError(f"{run_dir} is no run: it has no metrics.jsonl with a line in it")
    config = _config(run_dir / "config.toml")
    starts = read_metrics(run_dir / "starts.jsonl")
    undone = read_undone(run_dir)
    samples = _samples(read_metrics(run_dir / "samples.jsonl"))
    for part in undone:
        samples += [sample | {"undone": part.number} for sample in _samples(part.samples)]
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
        "undone": [
            {"number": part.number, "series": _series(part.entries, starts)} for part in undone
        ],
        "alarms": with_undone(alarms(entries), undone),
        "samples": samples,
    }


def with_undone(found: Sequence[dict[str, Any]], undone: Sequence[Undone]) -> list[dict[str, Any]]:
    """Alarms and, before each rollback among them, those of the steps that it undid."""
    before = {part.number: [_explained(event) for event in part.events] for part in undone}
    return [e for event in found for e in (*before.get(event.get("number", 0), ()), event)]


def alarms(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The alarms of a run as it wrote them; of a run that was not watched, those that it would have
    raised.

    Args:
      entries: its metrics.
    """
    found = [entry["event"] for entry in entries if "event" in entry]
    if not found and not any("diversity/distinct" in entry for entry in entries):
        found = [
            {**alarm._asdict(), "alarm": alarm.name, "at": alarm.step, "action": "replayed"}
            for alarm in replay_alarms(entries, LIMITS)
        ]
    return [_explained(event) for event in found]


def _explained(event: Mapping[str, Any]) -> dict[str, Any]:
    # A run of another version may know other alarms.
    cause = CAUSES.get(event["alarm"], Cause(title=event["alarm"], causes="", keys=()))
    return {**event, **cause._asdict()}


def _series(
    entries: Sequence[Mapping[str, Any]], starts: Sequence[Mapping[str, Any]]
) -> dict[str, Points]:
    """{metric that is drawn: its curve}; the parts of a step's time without the steps that
    compiled."""
    history = History()
    for entry in entries:
        history.add(entry)
    columns = {name: history.series(name) for name in sorted(drawn(history.names))}
    times = {name: column for name, column in columns.items() if name.startswith("time/")}
    compiled = {start["step"] + 1 for start in starts} or {1}
    curves = {name: extremes(column) for name, column in columns.items() if name not in times}
    return curves | means(times, without=compiled)


def _config(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _samples(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    steps = sorted({entry["step"] for entry in entries})
    every = -(-len(steps) // _MOST_SAMPLED_STEPS) or 1
    # The newest ones are among them.
    chosen = {*steps[::-1][::every]}
    return [entry for entry in entries if entry["step"] in chosen]


def as_script(value: Any) -> str:
    """JSON that can stand inside <script>."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
