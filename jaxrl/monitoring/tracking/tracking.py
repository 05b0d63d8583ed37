"""Metrics of a run: JSON lines, TensorBoard curves and a live display, safe to resume.

    with open_tracker(run_dir, start_step=0, total_steps=100) as tracker:
        tracker.log(1, {"reward": 0.4, "grad_norm": 0.2})

`metrics.jsonl` is the record from which pictures are made, TensorBoard's files are for looking.
Both forget what a killed run logged after the checkpoint that is resumed.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from jaxrl.core.files import write_whole
from jaxrl.monitoring.alarms.history import History
from jaxrl.monitoring.tracking.progress import Progress
from jaxrl.monitoring.tracking.services import Ending, Note, Service


class Tracker(NamedTuple):
    """Where metrics of a step go."""

    lines: "JsonLines"
    curves: "Curves"
    progress: Progress
    history: History
    services: Sequence[Service] = ()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics after `step` (steps done so far) everywhere. A step may be logged
        more than once, with other metrics: its entries are one line each."""
        self.lines.write(step, metrics)
        self.curves.write(step, metrics)
        self.progress.update(step, metrics)
        for service in self.services:
            service.write(step, metrics)
        self.history.add({"step": step, **metrics})

    def event(self, step: int, event: Mapping[str, Any]) -> None:
        """Records that an alarm was raised after `step` and what was done about it."""
        self.lines.write_event(step, event)
        numbers = {f"alarm/{event['alarm']}": event["value"]}
        for writer in (self.curves, *self.services):
            writer.write(step, numbers)

    def note(self, text: str) -> None:
        """A line above the live display."""
        self.progress.note(text)


class NullTracker:
    """A tracker that keeps and shows nothing."""

    def __init__(self) -> None:
        self.history = History()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Tracker.log`."""

    def event(self, step: int, event: Mapping[str, Any]) -> None:
        """See `Tracker.event`."""

    def note(self, text: str) -> None:
        """See `Tracker.note`."""


@contextmanager
def open_tracker(
    run_dir: str | os.PathLike[str],
    *,
    start_step: int,
    total_steps: int,
    title: str = "train",
    services: Callable[[Note], Sequence[Service]] = lambda note: (),
) -> Iterator[Tracker]:
    """Opens all for a run that has done `start_step` steps; what was logged after that step is
    forgotten. `services` opens others that metrics are sent to; they are told at the end whether
    the run has done its steps."""
    directory = Path(run_dir)
    directory.mkdir(parents=True, exist_ok=True)
    lines = JsonLines(directory / "metrics.jsonl", start_step=start_step)
    curves = Curves(directory / "tensorboard", start_step=start_step)
    history = History()
    for entry in read_metrics(directory / "metrics.jsonl"):
        history.add(entry)
    try:
        with Progress(title, start_step=start_step, total_steps=total_steps) as progress:
            opened = services(progress.note)
            ending: Ending = "failed"
            try:
                yield Tracker(lines, curves, progress, history, opened)
                ending = "finished" if history.step >= total_steps else "stopped"
            finally:
                for service in opened:
                    service.close(ending)
    finally:
        lines.close()
        curves.close()


class JsonLines:
    """One JSON object to a line, `{"step": 3, "time": 1790000000.0, ...}`, on the disk at once.

    A number that is not finite is written as null, which JSON can hold.
    """

    def __init__(self, path: Path, *, start_step: int):
        # A run that starts from nothing evaluates its step 0 again.
        kept = [
            e
            for e in read_metrics(path)
            if e["step"] <= start_step and (start_step or "event" in e)
        ]
        write_lines(path, kept)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a line; what is not finite becomes null."""
        entry: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        entry |= {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        self._write(entry)

    def write_event(self, step: int, event: Mapping[str, Any]) -> None:
        """Writes `{"step": 3, "time": ..., "event": {...}}`."""
        self._write({"step": step, "time": round(time.time(), 3), "event": dict(event)})

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def write_lines(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Writes a whole file of JSON lines."""
    write_whole(path, "".join(json.dumps(entry) + "\n" for entry in entries))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The entries of a metrics.jsonl; none if there is no file. A last line that a killed run left
    half written is dropped.

    Raises:
      ValueError: for any other line that is no JSON.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number}: not JSON: {error}") from None
    return entries


# The classes of a protocol-buffer module are made at import, where type checkers do not see them.
_events: Any = event_pb2
_summaries: Any = summary_pb2


class Curves:
    """TensorBoard's event files, written by TensorBoard's own writer."""

    def __init__(self, directory: Path, *, start_step: int):
        self._writer = EventFileWriter(str(directory), flush_secs=10)
        # TensorBoard drops the points of earlier files from this step on.
        restart = _events.SessionLog(status=_events.SessionLog.START)
        first = start_step + 1 if start_step else 0
        self._writer.add_event(
            _events.Event(session_log=restart, step=first, wall_time=time.time())
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a point to the curve of each metric."""
        values = [_summaries.Summary.Value(tag=k, simple_value=v) for k, v in metrics.items()]
        self._writer.add_event(
            _events.Event(
                summary=_summaries.Summary(value=values), step=step, wall_time=time.time()
            )
        )

    def close(self) -> None:
        """Writes what is left and closes the file."""
        self._writer.close()
