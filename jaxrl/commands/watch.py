"""Shows the reward, KL, gradient norm, tokens/s, time left, alarms and fleet of a run
as it trains, and ends with the run: with status 0 if that has finished, 3 if an alarm paused it,
4 if one stopped it, or else 1. It reads the run's directory, on the same machine, a shared file
system or in a bucket. Ctrl-C stops this command, not the run.

  jaxrl watch runs/latest
  jaxrl watch runs/latest --once"""

import argparse
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxrl.commands import options
from jaxrl.commands.paths import config_of
from jaxrl.commands.report import collect
from jaxrl.config.toml_file import read_tree
from jaxrl.fleet.events import FILE as FLEET_FILE, parse_event, summary as fleet_summary
from jaxrl.tracking.display import DISPLAYED, RECENT_STEPS, format_duration, seconds_left
from jaxrl.tracking.tracker import parse_entry, read_metrics
from jaxrl.training import copies
from jaxrl.training.ending import Ending, ending, is_training, last_action

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 40  # steps in a line of blocks
_ALARMS = 6
_ENDED = {"pause": "paused", "stop": "stopped"}


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    usage = "RUN [--every SECONDS] [--once]"
    made = options.plain_parser("watch", __doc__, usage=usage)
    made.add_argument("run", metavar="RUN", help="the run's directory, or its address in a bucket")
    made.add_argument(
        "--every", type=float, default=2.0, help="seconds between updates (default: 2)"
    )
    made.add_argument("--once", action="store_true", help="print the current state and exit")
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    given = parser().parse_args(argv)
    find = functools.partial(copies.copy_of, given.run, kind="watch", want=_watched)
    console, run = Console(), find()
    config_of(run)
    metrics = Tail(run / "metrics.jsonl")
    fleet = Tail(run / FLEET_FILE, parse=parse_event)

    def shown() -> tuple[RenderableType, Ending | None]:
        training = is_training(given.run)  # before its files are read, so that they are the last
        run, parts = find(), fleet_summary(fleet.read())
        if parts is not None and not training:
            training = None  # a fleet starts a learner that died again
        seen, ended = render(run, metrics, training=training)
        return seen if parts is None else Group(seen, Text(parts, style="dim")), ended

    if given.once:
        console.print(shown()[0])
        return 0
    try:
        seen, ended = shown()
        with Live(seen, console=console, auto_refresh=False) as live:
            while ended is None:
                time.sleep(given.every)
                seen, ended = shown()
                live.update(seen, refresh=True)
    except KeyboardInterrupt:
        return 0
    if not console.is_terminal:
        console.print()  # the last frame ends without a line's end
    there = ended.status == 0 and (run / "model").exists()
    model = f"; model: {given.run}/model" if there else ""
    console.print(ended.text + model, highlight=False, soft_wrap=True)
    return ended.status


def _watched(paths: Iterable[str]) -> Iterable[str]:
    return {"metrics.jsonl", "config.toml", "starts.jsonl", FLEET_FILE} & set(paths)


class Tail:
    """Entries of a JSON-lines file that another program appends to or replaces."""

    def __init__(self, path: Path, parse: Callable[[bytes], dict[str, Any]] = parse_entry) -> None:
        self._path, self._parse = path, parse
        self._forget()

    def _forget(self) -> None:
        self._entries: list[dict[str, Any]] = []
        self._end, self._last = 0, b""  # offset read so far, and the line that ends there

    def read(self) -> list[dict[str, Any]]:
        """Returns all complete entries so far, none without a file.

        Raises:
          ValueError: for a line that is not an entry.
        """
        if not self._path.exists():
            self._forget()
            return []
        with self._path.open("rb") as file:
            # A rollback or a resume replaces the file, and the last line is gone.
            file.seek(self._end - len(self._last))
            if file.read(len(self._last)) != self._last:
                self._forget()
                file.seek(0)
            lines = file.read().splitlines(keepends=True)
        for line in lines:
            if line.endswith(b"\n"):
                self._entries.append(self._parsed(line))
                self._end, self._last = self._end + len(line), line
        return self._entries

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            return self._parse(line)
        except (ValueError, RecursionError) as error:
            number = len(self._entries) + 1
            raise ValueError(f"{self._path}:{number}: not an entry: {error}") from None


def render(
    run: Path, metrics: Tail, *, training: bool | None
) -> tuple[RenderableType, Ending | None]:
    """Renders the current state of a run from its directory and its metrics.jsonl, and concludes
    how it ended from `training`, as `ending` does.

    Raises:
      ValueError: if the directory is not a run's.
    """
    entries, now, total = metrics.read(), time.time(), _total(run)
    starts = read_metrics(run / "starts.jsonl")
    started = starts[-1].get("time", 0.0) if starts else 0.0
    ended = ending(entries, total=total, training=training, now=now, started=started)
    if not entries:
        return "no step yet" if ended else "no step yet; the first one compiles", ended
    return view(entries, collect.alarms(entries), total=total, now=now, ended=ended), ended


def _total(run: Path) -> int:
    """Reads the number of steps of a run; raises ValueError if its config.toml has none."""
    path = config_of(run)
    train = read_tree(path).get("train")
    total = train.get("steps") if isinstance(train, dict) else None
    if not isinstance(total, int) or total < 1:
        raise ValueError(
            f"{path} is not the config of a run: it has no train.steps above 0; name the run_dir "
            "of a run that was started"
        )
    return total


def view(
    entries: Sequence[Mapping[str, Any]],
    alarms: Sequence[Mapping[str, Any]],
    *,
    total: int,
    now: float,
    ended: Ending | None = None,
) -> RenderableType:
    """Renders a run of `total` steps from at least one entry of `tracking.read_metrics`, its alarms
    from `report.collect.alarms` and its ending; `now` is in seconds since the epoch."""
    # Other entries belong to an evaluation or an alarm; every run has a "loss".
    steps = [e for e in entries if "reward" in e or "loss" in e]
    done = entries[-1]["step"]
    line = Table.grid(padding=(0, 2))
    state = _state(entries, steps, total=total, now=now, ended=ended)
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
    ended: Ending | None,
) -> str:
    last, action = entries[-1], last_action(entries)
    if action in _ENDED and (ended is None or ended.status):
        return _ENDED[action]
    if last["step"] >= total:
        return "done"
    if ended is not None:
        return "ended"
    times = [(e["step"], e["time"]) for e in steps[-RECENT_STEPS - 1 :] if "time" in e]
    left, silent = seconds_left(times, total=total), now - last.get("time", now)
    if left is None:
        return f"compiling; last update {format_duration(silent)} ago"
    usual = left / (total - last["step"])
    if silent > max(60.0, 5 * usual):
        return f"no update for {format_duration(silent)}"
    return f"{format_duration(left)} left"


def _alarm_line(alarm: Mapping[str, Any]) -> str:
    done = "" if alarm["action"] == "log" else f"; {alarm['action']}"
    back = f" to step {alarm['to']}" if "to" in alarm else ""
    return f"step {alarm['at']}: {alarm['title']}: {alarm['text']}{done}{back}"
