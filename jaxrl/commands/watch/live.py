"""Rendering of a run in progress: newest metrics, time left and alarms."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxrl.monitoring.tracking.progress import (
    DISPLAYED,
    RECENT_STEPS,
    format_duration,
    seconds_left,
)

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 40  # steps in a line of blocks
_ALARMS = 6
_ENDED = {"pause": "paused", "stop": "stopped"}


def view(
    entries: Sequence[Mapping[str, Any]],
    alarms: Sequence[Mapping[str, Any]],
    *,
    total: int,
    now: float,
) -> RenderableType:
    """Renders a run of `total` steps from at least one entry of `tracking.read_metrics` and its
    alarms from `report.collect.alarms`; `now` is in seconds since the epoch."""
    # Other entries belong to an evaluation or an alarm; every run has a "loss".
    steps = [e for e in entries if "reward" in e or "loss" in e]
    done = entries[-1]["step"]
    line = Table.grid(padding=(0, 2))
    state = _state(entries, steps, total=total, now=now)
    line.add_row(ProgressBar(total=total, completed=done, width=_WIDTH), f"{done}/{total}", state)
    table = Table.grid(padding=(0, 2))
    for label, name, form in DISPLAYED:
        # null stands for a value that was not finite.
        values = [math.nan if e[name] is None else e[name] for e in entries if name in e]
        if values:
            table.add_row(Text(label, style="dim"), form.format(values[-1]), blocks(values))
    lines = [Text(_alarm_line(alarm), style="yellow") for alarm in alarms[-_ALARMS:]]
    more = len(alarms) - len(lines)
    earlier = [Text(f"{more} earlier alarms", style="dim")] * (more > 0)
    return Group(line, table, *earlier, *lines)


def blocks(values: Sequence[float]) -> str:
    """Draws the last 40 values as blocks between their smallest and largest; "x" marks a value that
    is not finite."""
    shown = values[-_WIDTH:]
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BLOCKS[round((value - low) * scale)] if math.isfinite(value) else "x" for value in shown
    )


def _state(
    entries: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    *,
    total: int,
    now: float,
) -> str:
    last = entries[-1]
    # An alarm may be followed by an evaluation after the same step.
    news = [e["event"] for e in entries if e["step"] == last["step"] and "event" in e]
    if news and (action := news[-1]["action"]) in _ENDED:
        return _ENDED[action]
    if last["step"] >= total:
        return "done"
    times = [(e["step"], e["time"]) for e in steps[-RECENT_STEPS - 1 :] if "time" in e]
    left, silent = seconds_left(times, total=total), now - last.get("time", now)
    if left is None:
        return f"compiling; last update {format_duration(silent)} ago"
    usual = left / (total - last["step"])
    if silent > max(60.0, 5 * usual):
        return f"no update for {format_duration(silent)}"
    return f"{format_duration(left)} left"


def _alarm_line(alarm: Mapping[str, Any]) -> str:
    done = {"log": "", "replayed": ""}.get(alarm["action"], f"; {alarm['action']}")
    back = f" to step {alarm['to']}" if "to" in alarm else ""
    return f"step {alarm['at']}: {alarm['title']}: {alarm['text']}{done}{back}"
