"""What a run did in the steps that its rollbacks undid."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.monitoring.tracking.tracking import read_metrics


class Undone(NamedTuple):
    """The steps that one rollback undid.

    Attributes:
      number: of the rollback, from 1.
      entries: their metrics.
      samples: the answers that were kept of them.
    """

    number: int
    entries: Sequence[dict[str, Any]]
    samples: Sequence[dict[str, Any]]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The alarms of these steps. The one that was answered with the rollback is not among them:
        the run goes on with an event that says it."""
        events = (entry["event"] for entry in self.entries if "event" in entry)
        return [e | {"undone": self.number} for e in events if e["action"] != "rollback"]


def read_undone(run_dir: Path) -> list[Undone]:
    """Of every rollback that a run has behind it, the oldest first."""
    names = (re.fullmatch(r"rolled_back_(\d+)\.jsonl", path.name) for path in run_dir.iterdir())
    return [
        Undone(
            number,
            read_metrics(run_dir / f"rolled_back_{number}.jsonl"),
            read_metrics(run_dir / f"rolled_back_{number}_samples.jsonl"),
        )
        for number in sorted(int(found[1]) for found in names if found)
    ]
