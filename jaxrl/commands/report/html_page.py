"""One HTML page of one or several runs that needs nothing but itself."""

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jaxrl.commands.report.charts import charts_of
from jaxrl.commands.report.collect import as_script

# uPlot draws the charts (MIT licence, github.com/leeoniya/uPlot). Its file lies here as released:
# 51 KB in every page, and nothing to install.
_STYLES = ("uPlot.min.css", "page.css")
_SCRIPTS = ("uPlot.iife.min.js", "charts.js", "samples.js", "page.js")


def render(runs: Sequence[Mapping[str, Any]]) -> str:
    """The page.

    Args:
      runs: as `collect.collect` returns them, at least one.
    """
    files = resources.files("jaxrl.commands.report") / "page"

    def read(name: str) -> str:
        return (files / name).read_text(encoding="utf-8")

    names = {name for run in runs for part in (run, *run["undone"]) for name in part["series"]}
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
