"""`jaxrl watch`: follows a run from another terminal."""

import argparse
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from jaxrl.commands import options
from jaxrl.commands.report.collect import alarms
from jaxrl.commands.watch.live import view
from jaxrl.commands.watch.tail import Tail

DESCRIPTION = """Shows the reward, KL, gradient norm, tokens/s, time left and alarms of a run as it
trains. It reads the run's directory, on the same machine or a shared file system. Ctrl-C stops this
command, not the run.

  jaxrl watch runs/latest
  jaxrl watch runs/latest --once"""


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    usage = "RUN [--every SECONDS] [--once]"
    made = options.plain_parser("watch", DESCRIPTION, usage=usage)
    made.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    made.add_argument(
        "--every", type=float, default=2.0, help="seconds between updates (default: 2)"
    )
    made.add_argument("--once", action="store_true", help="print the current state and exit")
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    given = parser().parse_args(argv)
    console, metrics = Console(), Tail(given.run / "metrics.jsonl")
    if given.once:
        console.print(render(given.run, metrics))
        return 0
    try:
        with Live(render(given.run, metrics), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(given.every)
                live.update(render(given.run, metrics), refresh=True)
    except KeyboardInterrupt:
        return 0


def render(run: Path, metrics: Tail) -> RenderableType:
    """Renders the current state of a run from its directory and its metrics.jsonl.

    Raises:
      ValueError: if the directory is not a run's.
    """
    path = run / "config.toml"
    entries = metrics.read()
    if not path.exists():
        raise ValueError(f"{run} is not a run: it has no config.toml")
    if not entries:
        return "no step yet; the first one compiles"
    total = tomllib.loads(path.read_text(encoding="utf-8"))["train"]["steps"]
    return view(entries, alarms(entries), total=total, now=time.time())
