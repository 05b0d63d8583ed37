"""Changes the number of workers or servers of a running fleet. It writes a file to the
run's directory, on the same machine or a shared file system; the command that started the fleet
reads it. If the fleet has ended, nothing is changed, and the exit status is 1.

  jaxrl fleet runs/latest --workers 64 --servers 8"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.commands import options
from jaxrl.commands.paths import config_of
from jaxrl.config.toml_file import read_tree
from jaxrl.fleet.events import ending
from jaxrl.fleet.wanted import KINDS, Kind, ask


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.plain_parser("fleet", __doc__, usage="RUN [--workers N] [--servers N]")
    made.add_argument("run", metavar="RUN", type=Path, help="the run's directory")
    for kind in KINDS:
        made.add_argument(f"--{kind}", type=int, metavar="N", help="at least 1")
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Raises:
      ValueError: for a run without a fleet that has such parts, one whose fleet has ended, or a
        number below 1.
    """
    given = parser().parse_args(argv)
    asked = {kind: getattr(given, kind) for kind in KINDS if getattr(given, kind) is not None}
    if not asked:
        raise ValueError("nothing is asked for: give --workers N, --servers N or both")
    fleet = read_tree(config_of(given.run)).get("fleet")
    if fleet is None:
        raise ValueError(
            f"{given.run}/config.toml has no table [fleet], so the run has no fleet; name a run of "
            "`jaxrl train` with fleet.engine"
        )
    for kind, number in asked.items():
        _check(given.run, fleet, kind=kind, number=number)
    if (end := ending(given.run)) is not None:
        keys = " ".join(f"--fleet.{kind} {number}" for kind, number in asked.items())
        raise ValueError(
            f"the fleet of {given.run} {end}, so it has no parts any more; to train on, start its "
            f"command again, with {keys}"
        )
    for kind, number in asked.items():
        ask(given.run, kind, number)
    numbers = " and ".join(f"{number} {kind}" for kind, number in asked.items())
    print(f"asked for {numbers}; `jaxrl watch {given.run}` shows those that are there")
    return 0


def _check(run: Path, fleet: Mapping[str, Any], *, kind: Kind, number: int) -> None:
    if number < 1:
        raise ValueError(f"--{kind} {number}: a fleet with {kind} needs at least one")
    if fleet["engine"] == "none" or not fleet[kind]:
        raise ValueError(
            f"{run} was started with fleet.engine = {fleet['engine']!r} and fleet.{kind} = "
            f"{fleet[kind]}, so there are no {kind} whose number could change; start it again with "
            "both keys"
        )
