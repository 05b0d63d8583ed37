"""`jaxrl report`: writes a page that shows what happened in one or several runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """Writes one HTML file that shows what happened in a run, or in several, and opens
from disk and loads nothing: config, machine, curves with alarms, alpha and beta, where the time
went, sampled answers with their tokens coloured. A run may be going on meanwhile.

  jaxrl report runs/latest
  jaxrl report runs/a runs/b --out compared.html"""


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="jaxrl report",
        usage="jaxrl report RUN [RUN ...] [--out FILE]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's directory")
    parser.add_argument("--out", type=Path, help="the file (default: report.html in the first RUN)")
    given = parser.parse_args(argv)

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
    """What tells the runs' directories apart: the last part of each, or as many as it takes."""
    parts = [run.resolve().parts for run in runs]
    for size in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-size:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    return [f"{run} ({i})" for i, run in enumerate(runs, start=1)]
