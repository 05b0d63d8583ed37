"""A slow or bad network: a proxy on loopback for TCP connections to a port of this machine."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

_BLOCK = 1 << 16


class Link:
    """A link to a server on this machine.

    Attributes:
      port: to connect to instead.
      sent: bytes that have left the server, and bytes that have reached it.
      flows: cleared, the link carries nothing; what it was given arrives once it is set again.
    """

    def __init__(
        self,
        target: int,
        *,
        bandwidth: float = float("inf"),
        delay: float = 0.0,
        damage: Callable[[bytes], bytes | None] = lambda block: block,
    ) -> None:
        """Opens the link to port `target`.

        Args:
          target: the server's port.
          bandwidth: bytes per second of all connections, in each direction.
          delay: seconds that a connection waits before its first byte.
          damage: changes a block from the server; None cuts the connection.
        """
        self._target, self._delay, self._damage = target, delay, damage
        self._bandwidth = bandwidth
        self._free = [0.0, 0.0]  # when the link has sent what it was given, in each direction
        self._lock = threading.Lock()
        self.sent = [0, 0]
        self.flows = threading.Event()
        self.flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = self._listener.accept()[0]
                threading.Thread(target=self._connect, args=[connection], daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        time.sleep(self._delay)
        with contextlib.suppress(OSError):
            far = socket.create_connection(("127.0.0.1", self._target))
            back = threading.Thread(target=self._pass, args=[far, near, 0], daemon=True)
            back.start()
            self._pass(near, far, 1)
            back.join()
            far.close()
        near.close()

    def _pass(self, source: socket.socket, sink: socket.socket, direction: int) -> None:
        with contextlib.suppress(OSError):
            while block := source.recv(_BLOCK):
                self._wait(len(block), direction)
                self.flows.wait()
                arrived = block if direction else self._damage(block)
                if arrived is None:
                    source.shutdown(socket.SHUT_RDWR)
                    break
                sink.sendall(arrived)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _wait(self, nbytes: int, direction: int) -> None:
        with self._lock:
            self.sent[direction] += nbytes
            start = max(time.monotonic(), self._free[direction])
            self._free[direction] = end = start + nbytes / self._bandwidth
        time.sleep(max(0.0, end - time.monotonic()))
