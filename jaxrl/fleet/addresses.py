"""The addresses of a fleet's servers, in run_dir/fleet_urls.json: the fleet writes them, and the
learner reads them before each publish."""

import json
from pathlib import Path
from typing import NamedTuple

from jaxrl.core import write_whole

FILE = "fleet_urls.json"


class Addresses(NamedTuple):
    """The servers that there are now."""

    present: list[str]  # that take weights and requests
    leaving: list[str]  # that finish the requests they have


def write_addresses(directory: Path, addresses: Addresses) -> None:
    """Writes the addresses; `directory` is the run's."""
    write_whole(directory / FILE, json.dumps(addresses))


def read_addresses(directory: Path) -> Addresses | None:
    """Returns the addresses; None if there is no such file, or it cannot be read now."""
    try:
        return Addresses(*json.loads((directory / FILE).read_text()))
    except (OSError, ValueError):
        return None
