"""Serves the page of running runs to the browsers of this machine."""

import json
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

ADDRESS = "127.0.0.1"
_LOGS = ("metrics.jsonl", "samples.jsonl", "starts.jsonl", "config.toml", "rollbacks.json")
_WAITING = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2">'
    "<title>jaxrl</title><p>No step yet; the first one compiles."
)


def make_server(
    runs: Sequence[Path],
    *,
    port: int,
    collect: Callable[[], list[dict[str, Any]]],
    render: Callable[..., str],
    charts: Callable[[Sequence[Mapping[str, Any]]], list[dict[str, Any]]],
) -> ThreadingHTTPServer:
    """Makes a server on the loopback interface alone: `/` is the page, `/data?since=VERSION` the
    data in JSON, or 204 if nothing has changed since that version. Port 0 takes a free one.

    Raises:
      OSError: if the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page of another site may have resolved its name to this address.
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            asked = urlsplit(self.path)
            if host not in (ADDRESS, "localhost") or asked.path not in ("/", "/data"):
                self.send_error(404)
                return
            version = _version(runs)
            if asked.path == "/data" and parse_qs(asked.query).get("since") == [version]:
                self._answer(204, "", kind="text/plain")
                return
            waiting = any(not _has_steps(run) for run in runs)
            if asked.path == "/" and waiting:
                self._answer(200, _WAITING, kind="text/html")
                return
            try:
                found = collect()
            except ValueError as error:
                self._answer(500, str(error), kind="text/plain")
                return
            if asked.path == "/":
                self._answer(200, render(found, version=version), kind="text/html")
            else:
                data = {"version": version, "runs": found, "charts": charts(found)}
                self._answer(200, json.dumps(data, allow_nan=False), kind="application/json")

        def _answer(self, status: int, text: str, *, kind: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            if status != 204:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Prints nothing for a request."""

    return ThreadingHTTPServer((ADDRESS, port), Handler)


def _has_steps(run: Path) -> bool:
    path = run / "metrics.jsonl"
    if not path.exists():
        return False
    with path.open("rb") as file:
        return file.readline().endswith(b"\n")


def _version(runs: Sequence[Path]) -> str:
    """Returns a text that changes with the logs of the runs."""
    stats = [path.stat() for run in runs for name in _LOGS if (path := run / name).exists()]
    return "-".join(f"{found.st_mtime_ns:x}.{found.st_size:x}" for found in stats)
