"""Writes one self-contained HTML file about one or more runs: config, machine, curves
with alarms, alpha and beta, time per phase, and sampled completions with coloured tokens. It also
works while a run is training.

  jaxrl report runs/latest
  jaxrl report runs/a runs/b --out compared.html"""

import argparse
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jaxrl.commands import options
from jaxrl.commands.report.charts import charts_of
from jaxrl.commands.report.collect import collect

# uPlot (MIT licence, github.com/leeoniya/uPlot) draws the charts. Every page contains its released
# file: 51 KB, and nothing to install.
_STYLES = ("uPlot.min.css", "page.css")
_SCRIPTS = ("uPlot.iife.min.js", "charts.js", "samples.js", "page.js")


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.plain_parser("report", __doc__, usage="RUN [RUN ...] [--out FILE]")
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's directory")
    made.add_argument(
        "--out", type=Path, help="file to write (default: report.html in the first RUN)"
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    given = parser().parse_args(argv)
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


def render(runs: Sequence[Mapping[str, Any]]) -> str:
    """Renders a self-contained page from the data of `collect.collect` for at least one run."""
    files = resources.files("jaxrl.commands.report") / "page"

    def read(name: str) -> str:
        return (files / name).read_text(encoding="utf-8")

    def as_script(value: Any) -> str:
        return json.dumps(value, allow_nan=False).replace("<", "\\u003c")

    drawn = {name for run in runs for part in (run, *run["rolled_back"]) for name in part["series"]}
    parts = {
        "title": ", ".join(str(run["name"]) for run in runs).replace("<", "&lt;"),
        "styles": "\n".join(map(read, _STYLES)),
        "scripts": "\n".join(map(read, _SCRIPTS)),
        "charts": as_script(charts_of(drawn)),
        "data": as_script(list(runs)),
    }
    page = read("page.html")
    for name, text in parts.items():
        page = page.replace(f"[[{name}]]", text)
    return page
