"""`jaxrl report`: writes an HTML page about one or more runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxrl.commands import options

DESCRIPTION = """Writes one self-contained HTML file about one or more runs: config, machine, curves
with alarms, alpha and beta, time per phase, and sampled completions with coloured tokens. It also
works while a run is training.

  jaxrl report runs/latest
  jaxrl report runs/a runs/b --out compared.html"""


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.plain_parser("report", DESCRIPTION, usage="RUN [RUN ...] [--out FILE]")
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's directory")
    made.add_argument(
        "--out", type=Path, help="file to write (default: report.html in the first RUN)"
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    given = parser().parse_args(argv)

    from jaxrl.commands.report.collect import collect
    from jaxrl.commands.report.html_page import render

    out = given.out or given.runs[0] / "report.html"
    found = [
        collect(run, name=name) for run, name in zip(given.runs, names(given.runs), strict=True)
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(found), encoding="utf-8")
    raised = sum(len(run["alarms"]) for run in found)
    print(f"{out}: {len(found)} {'run' if len(found) == 1 else 'runs'}, {raised} alarms")
    return 0


def names(runs: Sequence[Path]) -> list[str]:
    """Names runs by the fewest trailing parts of their paths that differ."""
    parts = [run.resolve().parts for run in runs]
    for size in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-size:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    return [f"{run} ({i})" for i, run in enumerate(runs, start=1)]
