"""The network between a learner and servers."""

from collections.abc import Callable

import httpx2

from tests.bridge.protocol.processes import Request, Server
from tests.bridge.protocol.world import KilledError, World


class Network(httpx2.BaseTransport):
    """Carries a learner's requests to servers, or not."""

    def __init__(self, world: World, servers: list[Server], suspended: Callable[[], None]) -> None:
        """`suspended` is what happens while a learner is suspended."""
        self._world, self._servers, self._suspended = world, servers, suspended

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Returns a server's answer, or raises as httpx2."""
        url = f"http://{request.url.netloc.decode()}"
        (server,) = (one for one in self._servers if one.url == url)
        path, timeout = request.url.path, request.extensions["timeout"]["read"]
        sent = Request(request.method, path, request.url.query, request.headers.raw, request.read())
        kind = self._world.strike(path)
        self._before(kind, server, sent, timeout)
        try:
            status, body = server.answer(sent)
        except KilledError:
            server.stop()
            raise httpx2.ReadError("killed") from None
        self._settle(server)
        self._after(kind, server, timeout)
        kind_of_body = {"Content-Type": "application/json"}
        return httpx2.Response(status, headers=kind_of_body, content=body, request=request)

    def _before(self, kind: str, server: Server, sent: Request, timeout: float) -> None:
        if kind == "kill learner before":
            raise KilledError("learner")
        if kind == "suspend before":
            self._suspended()
        if kind == "kill server before":
            server.stop()
        if kind == "late":  # the learner gives up, and the network delivers it afterwards
            server.late.append(sent)
        if kind in ("late", "lose request"):
            self._world.sleep(timeout)
            raise httpx2.ReadTimeout("no answer")
        while server.late and server.alive and kind == "deliver before":
            self.deliver(server)
        if kind == "reset" or not server.alive:
            raise httpx2.ConnectError("refused")

    def _after(self, kind: str, server: Server, timeout: float) -> None:
        if kind == "kill learner after":
            raise KilledError("learner")
        if kind == "suspend after":
            self._suspended()
        if kind == "kill server after":
            server.stop()
            raise httpx2.ReadError("killed")
        if kind == "lose answer":
            self._world.sleep(timeout)
            raise httpx2.ReadTimeout("no answer")
        while server.late and server.alive and kind == "deliver after":
            self.deliver(server)

    def deliver(self, server: Server) -> None:
        """Delivers the oldest request that came late; nobody waits for the answer."""
        try:
            server.answer(server.late.pop(0))
        except KilledError:
            server.stop()
        self._settle(server)

    def _settle(self, server: Server) -> None:
        self._world.settle()
