"""A stand-in for an OpenEnv server: a game of guessing numbers behind its protocol."""

import base64
import hashlib
import http.server
import json
import struct
import threading
from contextlib import contextmanager

SCHEMA = {"properties": {"metadata": {"type": "object"}, "guess": {"type": "integer"}}}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    sessions: list[list[dict]] = []  # noqa: RUF012 - replaced for each server
    ended: list[threading.Event] = []  # noqa: RUF012

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/schema":
            body = json.dumps({"action": SCHEMA | {"required": ["guess"]}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        accept = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        digest = hashlib.sha1(accept.encode()).digest()
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(digest).decode())
        self.end_headers()
        self.close_connection = True
        seen, ended = [], threading.Event()
        self.sessions.append(seen)
        self.ended.append(ended)
        try:
            self.serve(seen)
        finally:
            ended.set()

    def serve(self, seen):
        number = 0
        while (kind := (frame := self.frame())[0]) != 8:
            if kind != 1:
                continue
            message = json.loads(frame[1])
            seen.append(message)
            data = message.get("data", {})
            if message["type"] == "close":
                return
            if message["type"] == "reset":
                number = data["seed"]
                answer = self.observe("Guess!")
            elif data["guess"] < 0:
                errors = [{"loc": ["guess"]}]
                answer = self.error("VALIDATION_ERROR", "Invalid message", errors=errors)
            elif data["guess"] == 13:
                answer = self.error("EXECUTION_ERROR", "unlucky")
            else:
                right = data["guess"] == number
                answer = self.observe("no" * data["guess"], reward=0.5 + right, done=right)
            self.say(json.dumps(answer))

    def observe(self, text, *, reward=None, done=False):
        data = {"observation": {"said": text, "empty": None}, "reward": reward, "done": done}
        return {"type": "observation", "data": data}

    def error(self, code, message, **more):
        return {"type": "error", "data": {"code": code, "message": message, **more}}

    def frame(self):
        """Reads a frame, whose payload must be masked."""
        first, second = self.rfile.read(2)
        assert second & 0x80
        size = second & 0x7F
        if size >= 126:
            size = int.from_bytes(self.rfile.read(2 if size == 126 else 8))
        mask, payload = self.rfile.read(4), self.rfile.read(size)
        return first & 0xF, bytes(b ^ mask[i % 4] for i, b in enumerate(payload))

    def say(self, text):
        """Sends a message in two frames with a ping between them."""
        payload = text.encode()
        half = len(payload) // 2
        for first, part in ((0x01, payload[:half]), (0x89, b"?"), (0x80, payload[half:])):
            size = len(part)
            if size < 126:
                head = struct.pack("!BB", first, size)
            elif size < 1 << 16:
                head = struct.pack("!BBH", first, 126, size)
            else:
                head = struct.pack("!BBQ", first, 127, size)
            self.wfile.write(head + part)


@contextmanager
def serving():
    """Yields (url, the messages of each session, an event of each that is set at its end)."""
    handler = type("Own", (Handler,), {"sessions": [], "ended": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", handler.sessions, handler.ended
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
