"""A WebSocket client: text messages over a blocking socket (RFC 6455)."""

import base64
import contextlib
import hashlib
import os
import queue
import socket
import ssl
import struct
import threading
import urllib.parse

_MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # section 1.3
_CONTINUED, _TEXT, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x8, 0x9, 0xA
_MOST = 64 << 20  # bytes of a message


class WebSocket:
    """A connection. A thread reads it and answers the server's pings, however long its user takes
    to ask for the next message."""

    def __init__(self, url: str, *, connect_timeout: float = 30.0) -> None:
        """Connects to a ws:// or wss:// address.

        Raises:
          ValueError: for another scheme.
          OSError: if the server cannot be reached or does not speak WebSocket.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("ws", "wss") or not parts.hostname:
            raise ValueError(f"{url!r}: expected ws://HOST:PORT/PATH or wss://...")
        secure = parts.scheme == "wss"
        port = parts.port or (443 if secure else 80)
        self._socket = socket.create_connection((parts.hostname, port), timeout=connect_timeout)
        try:
            if secure:
                context = ssl.create_default_context()
                self._socket = context.wrap_socket(self._socket, server_hostname=parts.hostname)
            self._received = self._socket.makefile("rb")
            self._shake_hands(parts, host=f"{parts.hostname}:{port}")
            self._socket.settimeout(None)
            self._lock, self._messages = threading.Lock(), queue.SimpleQueue[str | Exception]()
            threading.Thread(target=self._listen, name="websocket", daemon=True).start()
        except BaseException:
            self._socket.close()
            raise

    def send(self, text: str) -> None:
        """Sends a message; raises OSError if the server has ended the connection."""
        self._send(_TEXT, text.encode())

    def receive(self) -> str:
        """Returns the next message; raises ConnectionError if the server ends the connection."""
        message = self._messages.get()
        if isinstance(message, Exception):
            raise ConnectionError(str(message)) from message
        return message

    def close(self) -> None:
        """Ends the connection; a `receive` that waits in another thread raises."""
        with contextlib.suppress(OSError):  # the server was first
            self._send(_CLOSE, struct.pack("!H", 1000))
            self._socket.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        try:
            while True:
                self._messages.put(self._message())
        except Exception as error:
            self._messages.put(error)
        finally:
            self._received.close()
            self._socket.close()

    def _message(self) -> str:
        message = bytearray()
        while True:
            last, kind, payload = self._frame()
            if kind == _PING:
                self._send(_PONG, payload)
            elif kind == _CLOSE:
                raise ConnectionError(f"the server closed the session: {payload[2:].decode()!r}")
            elif kind in (_TEXT, _CONTINUED):
                message += payload
                if len(message) > _MOST:
                    raise ConnectionError(f"the server sent more than {_MOST} bytes in a message")
                if last:
                    return message.decode()

    def _shake_hands(self, parts: urllib.parse.SplitResult, *, host: str) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        path = f"{parts.path or '/'}{'?' * bool(parts.query)}{parts.query}"
        self._socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
            "".encode()
        )
        status = self._received.readline(4096).decode(errors="replace").strip()
        headers = {}
        while line := self._received.readline(65536).decode(errors="replace").strip():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        expected = base64.b64encode(hashlib.sha1((key + _MAGIC).encode()).digest()).decode()
        if " 101 " not in f"{status} " or headers.get("sec-websocket-accept") != expected:
            raise ConnectionError(f"{parts.geturl()} does not speak WebSocket: {status!r}")

    def _send(self, kind: int, payload: bytes) -> None:
        size, mask = len(payload), os.urandom(4)
        if size < 126:
            head = struct.pack("!BB", 0x80 | kind, 0x80 | size)
        elif size < 1 << 16:
            head = struct.pack("!BBH", 0x80 | kind, 0x80 | 126, size)
        else:
            head = struct.pack("!BBQ", 0x80 | kind, 0x80 | 127, size)
        pattern = (mask * (size // 4 + 1))[:size]
        masked = int.from_bytes(payload) ^ int.from_bytes(pattern)
        with self._lock:
            self._socket.sendall(head + mask + masked.to_bytes(size))

    def _frame(self) -> tuple[bool, int, bytes]:
        """Returns (is the message's last, kind, payload) of the next frame."""
        first, second = self._read(2)
        size = second & 0x7F  # a server does not mask
        if size >= 126:
            size = int.from_bytes(self._read(2 if size == 126 else 8))
        if size > _MOST:
            raise ConnectionError(f"the server sent a frame of {size} bytes")
        return bool(first & 0x80), first & 0x0F, self._read(size)

    def _read(self, size: int) -> bytes:
        read = self._received.read(size)
        if len(read) < size:
            raise ConnectionError("the server ended the connection")
        return read
