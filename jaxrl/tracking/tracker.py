"""The tracker of a run: JSON lines, TensorBoard curves, a live display and services.

    with open_tracker(run_dir, start_step=0, total_steps=100) as tracker:
        tracker.log(1, {"reward": 0.4, "grad_norm": 0.2})

`metrics.jsonl` is the record that reports and alarms read. On resume, JSON lines and TensorBoard
drop entries that a killed run logged after its checkpoint.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from jaxrl.core import read_whole, write_whole
from jaxrl.diagnostics import History
from jaxrl.tracking.display import ProgressDisplay
from jaxrl.tracking.services import Ending, Note, Service

_EVENT = {"alarm": str, "at": int, "action": str, "text": str}


class Tracker(NamedTuple):
    """Writes metrics and events to all outputs of a run."""

    lines: "JsonLines"
    curves: "TensorBoardCurves"
    progress: ProgressDisplay
    history: History
    services: Sequence[Service] = ()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics after `step` steps.

        A step may be logged more than once, with other metrics; each entry is one line.
        """
        self.lines.write(step, metrics)
        self.curves.write(step, metrics)
        self.progress.update(step, metrics)
        for service in self.services:
            service.write(step, metrics)
        self.history.add({"step": step, **metrics})

    def event(self, step: int, event: Mapping[str, Any]) -> None:
        """Logs an alarm raised after `step` steps and the action taken."""
        self.lines.write(step, {"event": dict(event)})
        metrics = {f"alarm/{event['alarm']}": event["value"]}
        for writer in (self.curves, *self.services):
            writer.write(step, metrics)

    def note(self, text: str) -> None:
        """Prints a line above the live display."""
        self.progress.note(text)

    def detail(self, text: str) -> None:
        """Prints a line that only the curious read: where the logger `jaxrl` shows INFO, as with
        `--verbose`."""
        if logging.getLogger("jaxrl").isEnabledFor(logging.INFO):
            self.note(text)


class NullTracker:
    """A tracker that writes nothing."""

    def __init__(self) -> None:
        self.history = History()

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    event = note = detail = log


@contextmanager
def open_tracker(
    run_dir: str | os.PathLike[str],
    *,
    start_step: int,
    total_steps: int,
    title: str = "train",
    services: Callable[[Note], Sequence[Service]] = lambda note: (),
) -> Iterator[Tracker]:
    """Opens the tracker of a run.

    Args:
      run_dir: created if missing.
      start_step: steps that the run has done; later entries are dropped.
      total_steps: of the whole run.
      title: of the live display.
      services: opens the services that receive metrics and the ending of the run.
    """
    directory = Path(run_dir)
    directory.mkdir(parents=True, exist_ok=True)
    logged = max((entry["step"] for entry in read_metrics(directory / "metrics.jsonl")), default=0)
    with (
        closing(JsonLines(directory / "metrics.jsonl", start_step=start_step)) as lines,
        closing(TensorBoardCurves(directory / "tensorboard", start_step=start_step)) as curves,
        ProgressDisplay(title, start_step=start_step, total_steps=total_steps) as progress,
    ):
        history = History(read_metrics(directory / "metrics.jsonl"))
        if logged > start_step:
            progress.note(
                f"starting after step {start_step}: the metrics of steps {start_step + 1} to "
                f"{logged} are dropped, and these steps run again"
            )
        opened = services(progress.note)
        ending: Ending = "failed"
        try:
            yield Tracker(lines, curves, progress, history, opened)
            ending = "finished" if history.step >= total_steps else "stopped"
        finally:
            for service in opened:
                service.close(ending)


class JsonLines:
    """A file with one JSON object per line, `{"step": 3, "time": 1790000000.0, ...}`.

    Each line is flushed at once. Numbers that are not finite are written as null.
    """

    def __init__(self, path: Path, *, start_step: int):
        # A run that starts at step 0 evaluates again, so only events are kept.
        kept = (e for e in read_metrics(path) if e["step"] <= start_step)
        write_lines(path, [e for e in kept if start_step or "event" in e])
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, entry: Mapping[str, Any]) -> None:
        """Appends the metrics after a step, or `{"event": {...}}`."""
        stamp = {"step": step, "time": round(time.time(), 3)}
        known = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in entry.items()
        }
        self._file.write(json.dumps(stamp | known) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def write_lines(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Writes a whole file of JSON lines atomically."""
    write_whole(path, "".join(json.dumps(entry) + "\n" for entry in entries))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the entries of a metrics.jsonl; [] without a file.

    Drops an incomplete last line of a killed run.

    Raises:
      ValueError: for any other bad line, which the message names, or a path that is not a file.
    """
    return _read(path)[0]


def incomplete_logs(directory: Path) -> list[str]:
    """Returns a line for each log whose last line is incomplete; raises as `read_metrics`."""
    paths = [directory / f"{name}.jsonl" for name in ("metrics", "samples", "judge", "starts")]
    return [f"{p}: its last line was incomplete and is dropped" for p in paths if _read(p)[1]]


def gap(history: History, *, step: int, every: int = 1) -> str | None:
    """Returns a line if the metrics of a run end before the checkpoint of a step; None otherwise.
    `every` is the largest number of steps between two entries."""
    if history.step > step - every:
        return None
    return (
        f"metrics.jsonl ends at step {history.step}, but the checkpoint is at step {step}: reports "
        "and alarms miss the steps between; training is not affected"
    )


def _read(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Returns (the entries, True if an incomplete last line was dropped)."""
    *lines, rest = (read_whole(path) or b"").split(b"\n")
    lines += [rest] * bool(rest)
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(parse_entry(line))
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return entries, True
            raise ValueError(
                f"{path}:{number}: not an entry: {error}. Delete this line to resume"
            ) from None
    return entries, False


def parse_entry(line: bytes) -> dict[str, Any]:
    """Reads a line of a log; raises ValueError for anything but an entry or a complete event."""
    entry = json.loads(line.decode())
    if not isinstance(entry, dict) or type(entry.get("step")) is not int:
        raise ValueError("expected an object with a step")
    event = entry.get("event")
    if "event" in entry and not (
        isinstance(event, dict) and all(type(event.get(k)) is kind for k, kind in _EVENT.items())
    ):
        raise ValueError(f"expected an event with {', '.join(_EVENT)}")
    return entry


# Protocol-buffer modules create their classes at import, which type checkers do not see.
_events: Any = event_pb2
_summaries: Any = summary_pb2


class TensorBoardCurves:
    """TensorBoard's event files, written by its own writer."""

    def __init__(self, directory: Path, *, start_step: int):
        self._writer = EventFileWriter(str(directory), flush_secs=10)
        # TensorBoard drops points of earlier files from this step on.
        restart = _events.SessionLog(status=_events.SessionLog.START)
        self._add(start_step + 1 if start_step else 0, session_log=restart)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a point to the curve of each metric."""
        values = [_summaries.Summary.Value(tag=k, simple_value=v) for k, v in metrics.items()]
        self._add(step, summary=_summaries.Summary(value=values))

    def close(self) -> None:
        """Writes buffered points and closes the file."""
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(_events.Event(step=step, wall_time=time.time(), **content))
