"""Connections to vLLM servers, which may be busy for minutes, or gone."""

import socket
from collections.abc import Mapping

import httpx2

_CONNECT_TIMEOUT = 10.0  # seconds; the kernel accepts connections, however busy the server is
# A connection is given up after 20 s in which the other end acknowledges nothing, though vLLM may
# take its time to answer.
_KEEP_ALIVE = {"SO_KEEPALIVE": 1, "TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


def make_client(address: str, *, headers: Mapping[str, str]) -> httpx2.Client:
    """Returns a client of the server at an address, each of whose requests has a connection of its
    own."""
    return httpx2.Client(
        base_url=address,
        headers=headers,
        transport=httpx2.HTTPTransport(
            limits=httpx2.Limits(max_keepalive_connections=0),
            trust_env=False,  # no proxy between a run and its servers
            socket_options=_keep_alive(),
        ),
        trust_env=False,
    )


def limits(timeout: float) -> httpx2.Timeout:
    """Returns the limits of a request that may take `timeout` seconds."""
    return httpx2.Timeout(timeout, connect=min(timeout, _CONNECT_TIMEOUT))


def _keep_alive() -> list[tuple[int, int, int]]:
    """Returns the options of `_KEEP_ALIVE` that this system has."""
    levels = {"SO": socket.SOL_SOCKET, "TCP": socket.IPPROTO_TCP}
    return [
        (levels[name.partition("_")[0]], getattr(socket, name), value)
        for name, value in _KEEP_ALIVE.items()
        if hasattr(socket, name)
    ]
