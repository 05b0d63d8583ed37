"""The end of a run, read from its directory."""

import fcntl
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.bridge import Bucket
from jaxrl.config.bucket import is_bucket
from jaxrl.tracking.tracker import read_metrics
from jaxrl.training.manifest import read_manifest

_QUIET = 60.0  # seconds: longer than a run takes from its last line of metrics to its model
_RESUME = "rerun its command to resume"


class Ending(NamedTuple):
    """The end of a run: a line about it, and the exit status for it."""

    text: str
    status: int  # 0 if finished, 3 if paused, 4 if stopped by an alarm, else 1


def is_training(run: str) -> bool | None:
    """Tells if a program trains in a run, a directory or an address in a bucket.

    In a bucket a killed program counts as training.

    Returns:
      None if that cannot be told: the directory's last start was on another host, or its file
        system has no locks.

    Raises:
      StoreError: if the bucket does not answer.
    """
    if is_bucket(run):
        found = read_manifest(Bucket(run.rstrip("/")))
        return None if found is None else found[0].training
    descriptor = os.open(run, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    # A network's file system may show a lock to its own host alone.
    starts = read_metrics(Path(run, "starts.jsonl"))
    return False if starts and starts[-1].get("host") == platform.node() else None


def ending(
    entries: Sequence[Mapping[str, Any]],
    *,
    total: int,
    training: bool | None,
    now: float,
    started: float = 0.0,
) -> Ending | None:
    """Concludes how a run of `total` steps ended; None while it may go on.

    Args:
      entries: lines of metrics.jsonl, read after `training`.
      total: steps of the whole run.
      training: as `is_training` returns it. If it cannot be told, a run that has finished or that
        an alarm has ended counts as ended after a minute.
      now: seconds since the epoch.
      started: the last start of a program, in seconds since the epoch.
    """
    if training:
        return None
    found = _concluded(entries, total=total, started=started)
    if training is None and (found.status == 1 or now - entries[-1].get("time", 0.0) < _QUIET):
        return None
    return found


def last_action(entries: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the action of the last alarm after the last step, or None."""
    # The alarm may be followed by an evaluation after the same step.
    last = entries[-1]["step"] if entries else None
    events = [e["event"]["action"] for e in entries if e["step"] == last and "event" in e]
    return events[-1] if events else None


def _concluded(entries: Sequence[Mapping[str, Any]], *, total: int, started: float) -> Ending:
    if not entries:
        return Ending(f"ended before the first step; {_RESUME}", 1)
    step, action = entries[-1]["step"], last_action(entries)
    # A start after a pause in the last step only writes the model.
    resumed = step == total and started > entries[-1].get("time", 0.0)
    if action == "pause" and not resumed:
        return Ending(f"paused by an alarm at step {step} of {total}; {_RESUME}", 3)
    if action == "stop":
        return Ending(f"stopped by an alarm at step {step} of {total}", 4)
    if step < total:
        return Ending(
            f"ended at step {step} of {total}: interrupted, killed or failed; {_RESUME}", 1
        )
    return Ending(f"finished after {total} steps", 0)
