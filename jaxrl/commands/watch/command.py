"""`jaxrl watch`: shows a run from another terminal while it goes on."""

import argparse
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from jaxrl.commands.report.collect import alarms
from jaxrl.commands.watch.live import view
from jaxrl.commands.watch.tail import Tail

DESCRIPTION = """Shows reward, KL, gradient norm, tokens/s, time left and alarms of a run while it
goes on, from its directory: on the same machine or over a shared file system. Ctrl-C ends the
command, not the run.

  jaxrl watch runs/latest
  jaxrl watch runs/latest --once    # prints it once"""


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="jaxrl watch",
        usage="jaxrl watch RUN [--every SECONDS] [--once]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument(
        "--every", type=float, default=2.0, help="seconds between looks (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="print once and end")
    given = parser.parse_args(argv)
    console, metrics = Console(), Tail(given.run / "metrics.jsonl")
    if given.once:
        console.print(look(given.run, metrics))
        return 0
    try:
        with Live(look(given.run, metrics), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(given.every)
                live.update(look(given.run, metrics), refresh=True)
    except KeyboardInterrupt:
        return 0


def look(run: Path, metrics: Tail) -> RenderableType:
    """What there is to see of a run now.

    Args:
      run: its directory.
      metrics: its metrics.jsonl.

    Raises:
      ValueError: if the directory holds no run.
    """
    path = run / "config.toml"
    entries = metrics.read()
    if not path.exists():
        raise ValueError(f"{run} is no run: it has no config.toml")
    if not entries:
        return "no step yet"
    config = tomllib.loads(path.read_text(encoding="utf-8"))
    return view(
        entries,
        alarms(entries),
        total=config["train"]["steps"],
        now=time.time(),
    )
