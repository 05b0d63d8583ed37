"""A run seen from another terminal while it goes on: its newest numbers, time left and alarms."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxrl.monitoring.tracking.progress import DISPLAYED
from jaxrl.monitoring.tracking.time_left import RECENT_STEPS, format_duration, seconds_left

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
    """What is shown of a run.

    Args:
      entries: its metrics, as `tracking.read_metrics` returns them, at least one.
      alarms: as `report.collect.alarms` returns them.
      total: steps of the whole run.
      now: seconds since the epoch.
    """
    # Other entries are of an evaluation, or of an alarm; "loss" is what every run has.
    steps = [e for e in entries if "reward" in e or "loss" in e]
    done = entries[-1]["step"]
    line = Table.grid(padding=(0, 2))
    state = _state(entries, steps, total=total, now=now)
    line.add_row(ProgressBar(total=total, completed=done, width=_WIDTH), f"{done}/{total}", state)
    table = Table.grid(padding=(0, 2))
    for label, name, form in DISPLAYED:
        # What was not finite is null.
        values = [math.nan if e[name] is None else e[name] for e in entries if name in e]
        if values:
            table.add_row(Text(label, style="dim"), form.format(values[-1]), blocks(values))
    said = [Text(_said(alarm), style="yellow") for alarm in alarms[-_ALARMS:]]
    more = len(alarms) - len(said)
    earlier = [Text(f"{more} earlier alarms", style="dim")] * (more > 0)
    return Group(line, table, *earlier, *said)


def blocks(values: Sequence[float]) -> str:
    """A line of blocks, each a value: the lowest for the smallest of the last 40, the highest for
    the largest, "x" for one that is not finite."""
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
    left = seconds_left([(e["step"], e["time"]) for e in steps[-RECENT_STEPS - 1 :]], total=total)
    silent = now - last["time"]
    if left is None:
        return f"no step yet; last news {format_duration(silent)} ago"
    usual = left / (total - last["step"])
    if silent > max(60.0, 5 * usual):
        return f"no news for {format_duration(silent)}"
    return f"{format_duration(left)} left"


def _said(alarm: Mapping[str, Any]) -> str:
    done = {"log": "", "replayed": ""}.get(alarm["action"], f"; {alarm['action']}")
    back = f" to step {alarm['to']}" if "to" in alarm else ""
    return f"step {alarm['at']}: {alarm['title']}: {alarm['text']}{done}{back}"
