"""A self-contained HTML page about one or more runs."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jaxrl.commands.report.charts import charts_of

# uPlot (MIT licence, github.com/leeoniya/uPlot) draws the charts. Every page contains its released
# file: 51 KB, and nothing to install.
_STYLES = ("uPlot.min.css", "page.css")
_SCRIPTS = ("uPlot.iife.min.js", "charts.js", "samples.js", "page.js")


def render(runs: Sequence[Mapping[str, Any]]) -> str:
    """Renders the page from the data of `collect.collect` for at least one run."""
    files = resources.files("jaxrl.commands.report") / "page"

    def read(name: str) -> str:
        return (files / name).read_text(encoding="utf-8")

    def as_script(value: Any) -> str:
        return json.dumps(value, allow_nan=False).replace("<", "\\u003c")

    names = {name for run in runs for part in (run, *run["rolled_back"]) for name in part["series"]}
    parts = {
        "title": ", ".join(str(run["name"]) for run in runs).replace("<", "&lt;"),
        "styles": "\n".join(map(read, _STYLES)),
        "scripts": "\n".join(map(read, _SCRIPTS)),
        "charts": as_script(charts_of(names)),
        "data": as_script(list(runs)),
    }
    page = read("page.html")
    for name, text in parts.items():
        page = page.replace(f"[[{name}]]", text)
    return page
