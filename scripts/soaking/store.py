"""A web server for objects that fails on purpose."""

import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class FaultyStore(ThreadingHTTPServer):
    """Keeps objects in memory, below an address on loopback.

    It also answers requests as a proxy does, with its own objects: so each host may have a link of
    its own to it, under one address.

    Attributes:
      objects: contents by path.
      down_until: time until which connections break without an answer.
      full_until: time until which nothing can be written.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        """Listens at a free port."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.down_until = self.full_until = 0.0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        """The port that it listens at."""
        return self.server_address[1]

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def __enter__(self) -> Self:
        return self

    def handle_error(self, *_: Any) -> None:
        """Prints nothing for a connection that a client has closed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyStore

    def log_message(self, *_: object) -> None:
        """Prints nothing."""

    def do_GET(self) -> None:
        """Answers with an object."""
        found = self.server.objects.get(self._name())
        self._answer(404 if found is None else 200, found or b"")

    def do_PUT(self) -> None:
        """Writes an object, unless the disk is full."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        full = time.monotonic() < self.server.full_until
        if not full and not self._down():
            self.server.objects[self._name()] = content
        self._answer(507 if full else 201)

    def do_DELETE(self) -> None:
        """Deletes an object."""
        there = self._down() or self.server.objects.pop(self._name(), None) is not None
        self._answer(204 if there else 404)

    def do_PROPFIND(self) -> None:
        """Cannot list."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(501)

    def _name(self) -> str:
        return urllib.parse.urlsplit(self.path).path

    def _down(self) -> bool:
        return time.monotonic() < self.server.down_until

    def _answer(self, status: int, content: bytes = b"") -> None:
        if self._down():
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
