"""A stand-in for a server that speaks JSON over HTTP."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JsonHandler(BaseHTTPRequestHandler):
    """Reads and writes JSON; a subclass has the routes."""

    def get(self) -> None:
        """Answers a GET."""
        raise AssertionError(self.path)

    def post(self, body: Any) -> None:
        """Answers a POST with this content."""
        raise AssertionError(self.path)

    def do_GET(self) -> None:
        """See `get`."""
        self.get()

    def do_POST(self) -> None:
        """See `post`."""
        self.post(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, content: Any, *, status: int = 200) -> None:
        """Sends an answer."""
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@contextmanager
def serving(handler: type[JsonHandler]) -> Iterator[str]:
    """Serves requests in a thread; yields the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def sampled(body: Any, *, gap: float) -> Any:
    """Answers a request to /v1/completions; each token's log-prob is `gap` below the largest."""
    count = body["max_tokens"]
    logprobs = {
        "token_logprobs": [-1.0 - gap] * count,
        "top_logprobs": [{"a": -1.0, "b": -1.0 - gap}] * count,
    }
    return {"choices": [{"logprobs": logprobs}] * body["n"]}
