"""Snapshots of a run directory while a run writes to it."""

import os
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jaxrl.training.manifest import Entry

CHECKPOINTS = "checkpoints"
AT_END = ("model", "adapter")  # folders that are written once, after the last step
_TRIES = 20


class BusyError(RuntimeError):
    """The directory changed too fast."""


class Taken(NamedTuple):
    """A file of a snapshot."""

    path: Path  # to read its bytes from
    entry: Entry  # without the name of an object


def steps(directory: Path) -> dict[str, int]:
    """Returns the complete checkpoints of a run directory, with the times of their folders."""
    saved = directory / CHECKPOINTS
    if not saved.is_dir():
        return {}
    return {e.name: e.stat().st_mtime_ns for e in os.scandir(saved) if e.name.isdigit()}


def take(
    directory: Path, staging: Path, *, sent: Mapping[str, Entry], ended: bool
) -> tuple[dict[str, Entry], dict[str, Taken]]:
    """Takes a snapshot of a run directory: all files as they are at one moment, but logs may have
    grown since.

    Args:
      directory: the run directory.
      staging: an empty folder of the same file system, for links to files and copies of logs.
      sent: files that need not be taken if they are the same.
      ended: True if nothing writes any more; only then the folders `AT_END` are complete.

    Returns:
      (the files that are as in `sent`, the others).

    Raises:
      BusyError: if files were replaced at every try.
    """
    for _ in range(_TRIES):
        try:
            before = _scan(directory, ended=ended)
            same = {path: sent[path] for path, now in before.items() if _is(sent.get(path), now)}
            others = {
                path: _stage(directory, path, now, place=None if ended else staging / str(i))
                for i, (path, now) in enumerate(before.items())
                if path not in same
            }
            if _only_grown(before, _scan(directory, ended=ended)):
                return same, others
        except FileNotFoundError:  # a checkpoint was deleted
            pass
        shutil.rmtree(staging)
        staging.mkdir()
        time.sleep(0.05)
    raise BusyError(f"the files in {directory} changed while they were read")


def _scan(directory: Path, *, ended: bool) -> dict[str, os.stat_result]:
    found: dict[str, os.stat_result] = {}
    for folder, folders, names in os.walk(directory):
        inner = Path(folder).relative_to(directory)
        if inner == Path(CHECKPOINTS):
            folders[:] = [name for name in folders if name.isdigit()]
        elif inner == Path() and not ended:
            folders[:] = [name for name in folders if name not in AT_END]
        for name in names:
            status = Path(folder, name).lstat()
            # Those that end in .new are being written (`write_whole`).
            if stat.S_ISREG(status.st_mode) and not name.endswith(".new"):
                found[(inner / name).as_posix()] = status
    return found


def _is(entry: Entry | None, now: os.stat_result) -> bool:
    return entry is not None and (entry.size, entry.mtime) == (now.st_size, now.st_mtime_ns)


def _stage(directory: Path, path: str, now: os.stat_result, *, place: Path | None) -> Taken:
    """Keeps the content of a file at `place`; None leaves it where it is."""
    if place is None:
        place = directory / path
    elif not (path.startswith(f"{CHECKPOINTS}/") and _linked(directory / path, place)):
        shutil.copyfile(directory / path, place)
    return Taken(place, Entry(object="", size=place.stat().st_size, mtime=now.st_mtime_ns))


def _linked(path: Path, place: Path) -> bool:
    """Links a file that nothing appends to; returns False if the file system has no links."""
    try:
        os.link(path, place)
    except FileNotFoundError:
        raise
    except OSError:
        return False
    return True


def _only_grown(before: Mapping[str, os.stat_result], after: Mapping[str, os.stat_result]) -> bool:
    """Tells if the files are the same, except that some have been appended to."""
    if before.keys() != after.keys():
        return False
    for path, old in before.items():
        new = after[path]
        grown = new.st_size > old.st_size
        if new.st_ino != old.st_ino or not (grown or new.st_mtime_ns == old.st_mtime_ns):
            return False
    return True
