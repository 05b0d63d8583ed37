"""The output of a run: checkpoints and metrics in its directory."""

from pathlib import Path
from typing import NamedTuple

from jaxrl.monitoring.tracking.tracking import NullTracker, Tracker
from jaxrl.training.storage.checkpoint import Checkpoints


class Records(NamedTuple):
    """The output of a run.

    Attributes:
      directory: the run directory.
      checkpoints: in the run directory.
      tracker: takes metrics and notes; a NullTracker on processes other than 0.
    """

    directory: Path
    checkpoints: Checkpoints
    tracker: Tracker | NullTracker
