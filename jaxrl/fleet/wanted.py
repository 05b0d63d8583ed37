"""The number of workers that a user asks of a running fleet, in run_dir/fleet_workers."""

from pathlib import Path

FILE = "fleet_workers"


class Wanted:
    """The number that users have asked for since the fleet began."""

    def __init__(self, directory: Path) -> None:
        """Forgets what an earlier fleet of the run was asked for. `directory` is the run's."""
        self._path = directory / FILE
        self._path.unlink(missing_ok=True)

    def read(self) -> int | None:
        """Returns the number; None if nobody has asked, or no number can be read."""
        try:
            return max(1, int(self._path.read_text()))
        except (OSError, ValueError):
            return None


def ask(directory: Path, workers: int) -> None:
    """Asks the fleet of a run for a number of workers, at least one."""
    new = directory / f"{FILE}.new"
    new.write_text(f"{workers}\n")
    new.replace(directory / FILE)
