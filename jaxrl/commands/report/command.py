"""Writes one self-contained HTML file about one or more runs: config, machine, curves
with alarms, alpha and beta, time per phase, and sampled completions with coloured tokens. It also
works while a run is training; with --follow the page renews itself.

  jaxrl report runs/latest
  jaxrl report runs/a runs/b --out compared.html
  jaxrl report --follow runs/latest"""

import argparse
import contextlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

from jaxrl.bridge import StoreError
from jaxrl.commands import options
from jaxrl.commands.paths import config_of
from jaxrl.commands.report.charts import charts_of
from jaxrl.commands.report.collect import collect
from jaxrl.commands.report.serve import ADDRESS, make_server
from jaxrl.config.bucket import is_bucket
from jaxrl.training.copies import copy_of

# uPlot (MIT licence, github.com/leeoniya/uPlot) draws the charts. Every page contains its released
# file: 51 KB, and nothing to install.
_STYLES = ("uPlot.min.css", "page.css")
_SCRIPTS = (
    "language.js",
    "uPlot.iife.min.js",
    "base.js",
    "labels.js",
    "charts.js",
    "outcome.js",
    "chat.js",
    "held_out.js",
    "samples.js",
    "page.js",
    "live.js",
)


_RENEWED = 5.0  # seconds between two looks into a bucket


def parser() -> argparse.ArgumentParser:
    """Builds the command's parser."""
    made = options.plain_parser("report", __doc__, usage="RUN [RUN ...] [--out FILE | --follow]")
    made.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run's directory, or its address in a bucket"
    )
    made.add_argument(
        "--out", type=options.output, help="file to write (default: report.html in the first RUN)"
    )
    made.add_argument(
        "--follow",
        action="store_true",
        help="serve the page to browsers of this machine, renewed as the run goes on",
    )
    made.add_argument(
        "--port", type=int, default=None, help="port of --follow (default: 8080, or a free one)"
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    made = parser()
    given = made.parse_args(argv)
    if given.follow and given.out is not None:
        made.error("--follow writes no file: leave out --out, or --follow")
    if given.port is not None and not given.follow:
        made.error("--port is the port of the page that --follow serves: add --follow")
    runs = _find(given.runs)
    if given.follow:
        if any(map(is_bucket, given.runs)):
            threading.Thread(target=_keep_finding, args=(given.runs,), daemon=True).start()
        return _follow(runs, port=given.port)
    out = given.out or runs[0] / "report.html"
    found = _collected(runs)
    out.write_text(render(found), encoding="utf-8")
    raised = sum(len(run["alarms"]) for run in found)
    print(f"{out}: {len(found)} {'run' if len(found) == 1 else 'runs'}, {raised} alarms")
    return 0


def _find(runs: Sequence[str]) -> list[Path]:
    return [copy_of(run, kind="report") for run in runs]


def _keep_finding(runs: Sequence[str]) -> None:
    """Renews the copies of runs in a bucket; a bucket that does not answer is asked again."""
    while True:
        time.sleep(_RENEWED)
        with contextlib.suppress(StoreError):
            _find(runs)


def _collected(runs: Sequence[Path]) -> list[dict[str, Any]]:
    return [collect(run, name=name) for run, name in zip(runs, names(runs), strict=True)]


def make_page_server(runs: Sequence[Path], *, port: int) -> ThreadingHTTPServer:
    """Makes the server of the page of some runs; see `serve.make_server`."""
    return make_server(
        runs, port=port, collect=lambda: _collected(runs), render=render, charts=charts
    )


def _follow(runs: Sequence[Path], *, port: int | None) -> int:
    """Serves the page until Ctrl-C."""
    for run in runs:
        config_of(run)
    try:
        server = make_page_server(runs, port=8080 if port is None else port)
    except OSError as error:
        if port is not None:
            raise ValueError(f"--port {port}: {error.strerror}; choose another one") from None
        server = make_page_server(runs, port=0)
    with server:
        print(
            f"http://{ADDRESS}:{server.server_port}/ (Ctrl-C stops this, not the run)", flush=True
        )
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def names(runs: Sequence[Path]) -> list[str]:
    """Names runs by the fewest trailing parts of their paths that differ."""
    parts = [run.resolve().parts for run in runs]
    for size in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-size:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    return [f"{run} ({i})" for i, run in enumerate(runs, start=1)]


def charts(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Selects the charts that some runs have metrics for."""
    parts = [part for run in runs for part in (run, *run["rolled_back"])]
    return charts_of({name for part in parts for name in part["series"]})


def render(runs: Sequence[Mapping[str, Any]], *, version: str = "") -> str:
    """Renders a self-contained page from the data of `collect.collect` for at least one run. With a
    `version` of the data, the page asks the server that it came from for newer ones."""
    files = resources.files("jaxrl.commands.report") / "page"

    def read(name: str) -> str:
        return (files / name).read_text(encoding="utf-8")

    def as_script(value: Any) -> str:
        return json.dumps(value, allow_nan=False).replace("<", "\\u003c")

    title = ", ".join(str(run["name"]) for run in runs).replace("<", "&lt;")
    parts = {
        "title": title,
        "name": title if len(runs) == 1 else f"{len(runs)} runs",
        "connect": " connect-src 'self'" * bool(version),
        "version": version,
        "styles": "\n".join(map(read, _STYLES)),
        "scripts": "\n".join(map(read, _SCRIPTS)),
        "charts": as_script(charts(runs)),
        "data": as_script(list(runs)),
    }
    page = read("page.html")
    for name, text in parts.items():
        page = page.replace(f"[[{name}]]", text)
    return page
