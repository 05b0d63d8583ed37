"""A stand-in for a vLLM server."""

import contextlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECONDS = 100.0  # within which everything happens on the busiest machine
Reply = Callable[[dict[str, Any]], tuple[int, str]]


class Server(ThreadingHTTPServer):
    """Answers with `reply(body)`; a status of 0 closes the connection."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply: Reply = respond
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.clients: set[int] = set()
        self.busy, self.busiest, self.lock = 0, 0, threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.keys.add(self.headers["Authorization"])
            self.server.clients.add(self.client_address[1])
            self.server.busy += 1
            self.server.busiest = max(self.server.busiest, self.server.busy)
        status, text = self.server.reply(body)
        with self.server.lock:
            self.server.busy -= 1
        if not status:
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # a client that was closed hangs up
            self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


def choice(index: int, tokens: list[int], **changes: Any) -> dict[str, Any]:
    return {
        "index": index,
        "token_ids": tokens,
        "logprobs": {"content": [{"logprob": -0.25 * (i + 1)} for i in range(len(tokens))]},
        "finish_reason": "length",
        "weight_versions": [{"version": "4", "start": 0, "end": len(tokens)}],
    } | changes


def respond(body: dict[str, Any]) -> tuple[int, str]:
    settings = body["sampling_params"]
    made = [choice(i, [7 + i] * settings["max_tokens"]) for i in range(settings["n"])]
    return 200, json.dumps({"choices": made[::-1]})


def together(count: int) -> Reply:
    """Answers once `count` requests are there."""
    meet = threading.Barrier(count)

    def reply(body: dict[str, Any]) -> tuple[int, str]:
        meet.wait(SECONDS)
        return respond(body)

    return reply
