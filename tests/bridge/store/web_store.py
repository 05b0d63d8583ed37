"""A web server as store, in this process."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WebStore(ThreadingHTTPServer):
    """A web server that keeps what it is given."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port: int = self.server_address[1]
        self.objects: dict[str, bytes] = {}
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WebStore

    def log_message(self, *_: Any) -> None:
        pass

    def do_PUT(self) -> None:
        self.server.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(201, b"")

    def do_GET(self) -> None:
        data = self.server.objects.get(self.path)
        self.answer(404 if data is None else 200, data or b"")

    def do_DELETE(self) -> None:
        self.answer(404 if self.server.objects.pop(self.path, None) is None else 200, b"")

    def answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("ETag", '"x"')
        self.end_headers()
        self.wfile.write(data)
