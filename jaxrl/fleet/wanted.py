"""The numbers of parts that a user asks of a running fleet, in run_dir/fleet_workers and
run_dir/fleet_servers."""

from pathlib import Path
from typing import Literal

from jaxrl.core import write_whole

Kind = Literal["workers", "servers"]
KINDS: tuple[Kind, ...] = "workers", "servers"


class Wanted:
    """The number that users have asked for since the fleet began."""

    def __init__(self, directory: Path, kind: Kind) -> None:
        """Forgets what an earlier fleet of the run was asked for. `directory` is the run's."""
        self._path = wanted_file(directory, kind)
        self._path.unlink(missing_ok=True)

    def read(self) -> int | None:
        """Returns the number; None if nobody has asked, or no number can be read."""
        try:
            return max(1, int(self._path.read_text()))
        except (OSError, ValueError):
            return None


def ask(directory: Path, kind: Kind, number: int) -> None:
    """Asks the fleet of a run for a number of workers or servers, at least one."""
    write_whole(wanted_file(directory, kind), f"{number}\n")


def wanted_file(directory: Path, kind: Kind) -> Path:
    """Returns the file that holds the number."""
    return directory / f"fleet_{kind}"
