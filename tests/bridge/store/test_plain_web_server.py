"""A store on a web server that knows no more than GET, PUT and DELETE: Python's own."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jaxrl.bridge.store.objects import Objects, Store
from tests.bridge.asking import KEY
from tests.bridge.cases import ListSource
from tests.bridge.store.hosts import host
from tests.bridge.store.test_store import check, publisher, weights


class PlainServer(ThreadingHTTPServer):
    """Serves a directory, and counts the requests by method and status."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.answers = root, Counter[tuple[str, int]]()

    def finish_request(self, request, client_address) -> None:
        Handler(request, client_address, self, directory=str(self.root))


class Handler(SimpleHTTPRequestHandler):
    """Any method that it does not name is answered 501 by Python's server."""

    protocol_version = "HTTP/1.1"
    server: PlainServer

    def do_PUT(self) -> None:
        """Writes a file."""
        data = self.rfile.read(int(self.headers["Content-Length"]))
        path = Path(self.translate_path(self.path))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self.answer(201)

    def do_DELETE(self) -> None:
        """Deletes a file; 404 if there is none."""
        path = Path(self.translate_path(self.path))
        found = path.is_file()
        path.unlink(missing_ok=True)
        self.answer(204 if found else 404)

    def answer(self, status: int) -> None:
        """Answers without a body."""
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_request(self, code="-", size="-") -> None:
        self.server.answers[self.command, int(code)] += 1

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PlainServer]:
    root = tmp_path / "root"
    root.mkdir()
    with PlainServer(root) as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield made
        made.shutdown()


def url(server: PlainServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/path"


def left(server: PlainServer) -> list[str]:
    return sorted(path.name for path in server.root.rglob("*") if path.is_file())


def test_deleting_goes_on_past_what_is_missing(server: PlainServer) -> None:
    """Against a list, a web server stops at the first that it does not have."""
    objects = Objects(Store(url(server), KEY))
    names = [f"object-{i}" for i in range(20)]
    for name in names:
        objects.put(name, b"x")
    objects.delete([name for at, name in enumerate(names) for name in (f"missing-{at}", name)])
    assert left(server) == []


def test_listing_that_is_not_implemented_costs_nothing(server: PlainServer) -> None:
    """With retries a run would stand still for a minute at its start and at its end."""
    (one,) = host(server.root.parent / "a", key=KEY)
    start = time.monotonic()
    with publisher([one], url(server)) as learner:
        for number, changed in enumerate((1.0, 0.1)):
            tensors = weights(number, changed=changed)
            learner.publish(ListSource(tensors), version=number)
            check(one, tensors)
    assert time.monotonic() - start < 30.0
    assert server.answers["PROPFIND", 501] == 2  # asked once at the start and once at the end
    assert left(server) == []
