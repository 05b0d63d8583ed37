"""Changes the number of workers of a running fleet. It writes a file to the run's
directory, on the same machine or a shared file system; the command that started the fleet reads it.
If the fleet has ended, nothing is changed, and the exit status is 1.

  jaxrl fleet runs/latest --workers 64"""

import argparse
import tomllib
from collections.abc import Sequence
from pathlib import Path

from jaxrl.commands import options
from jaxrl.commands.paths import config_of
from jaxrl.fleet.events import ending
from jaxrl.fleet.wanted import ask


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.plain_parser("fleet", __doc__, usage="RUN --workers N")
    made.add_argument("run", metavar="RUN", type=Path, help="the run's directory")
    made.add_argument("--workers", type=int, required=True, help="at least 1")
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Raises:
      ValueError: for a run without a fleet of workers, one whose fleet has ended, or no worker.
    """
    given = parser().parse_args(argv)
    if given.workers < 1:
        raise ValueError(f"--workers {given.workers}: a fleet with workers needs at least one")
    fleet = tomllib.loads(config_of(given.run).read_text(encoding="utf-8")).get("fleet")
    if fleet is None:
        raise ValueError(
            f"{given.run}/config.toml has no table [fleet], so the run has no workers; name a run "
            "of `jaxrl train` with fleet.engine and fleet.workers"
        )
    if fleet["engine"] == "none" or not fleet["workers"]:
        raise ValueError(
            f"{given.run} was started with fleet.engine = {fleet['engine']!r} and fleet.workers = "
            f"{fleet['workers']}, so there are no workers whose number could change; start it "
            "again with both keys"
        )
    if (end := ending(given.run)) is not None:
        raise ValueError(
            f"the fleet of {given.run} {end}, so it has no workers any more; to train on, start "
            f"its command again, with --fleet.workers {given.workers}"
        )
    ask(given.run, given.workers)
    print(
        f"asked for {given.workers} workers; `jaxrl watch {given.run}` shows those that are there"
    )
    return 0
