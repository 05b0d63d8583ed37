"""Records of the steps that a run's rollbacks discarded."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl.monitoring.tracking.tracking import read_metrics


class RolledBackSteps(NamedTuple):
    """The steps that one rollback discarded."""

    number: int  # number of the rollback, from 1
    entries: Sequence[dict[str, Any]]  # metrics of these steps
    samples: Sequence[dict[str, Any]]  # sampled completions of these steps

    @property
    def events(self) -> list[dict[str, Any]]:
        """Lists the alarms of these steps, except the one that caused the rollback: the run's own
        metrics record that one."""
        events = (entry["event"] for entry in self.entries if "event" in entry)
        return [e | {"rollback": self.number} for e in events if e["action"] != "rollback"]


def read_rolled_back_steps(run_dir: Path) -> list[RolledBackSteps]:
    """Reads the discarded steps of every rollback, oldest first."""
    names = (re.fullmatch(r"rolled_back_(\d+)\.jsonl", path.name) for path in run_dir.iterdir())
    return [
        RolledBackSteps(
            number,
            read_metrics(run_dir / f"rolled_back_{number}.jsonl"),
            read_metrics(run_dir / f"rolled_back_{number}_samples.jsonl"),
        )
        for number in sorted(int(found[1]) for found in names if found)
    ]
