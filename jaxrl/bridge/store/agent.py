"""Agent of a host with servers: fetches versions from a store while the servers sample.

`jaxrl serve` runs this program, which never imports jax, for all of its servers. Its argument is a
directory in shared memory; its standard input is a pipe that closes when `jaxrl serve` ends. It
answers each line of JSON from the servers' relays (`in_vllm/relay.py`) with a line of JSON.
"""

import collections
import contextlib
import functools
import json
import os
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.bridge import manifest
from jaxrl.bridge.base import REFUSED
from jaxrl.bridge.in_vllm.auth import KEY
from jaxrl.bridge.in_vllm.relay import PAYLOADS, SOCKET
from jaxrl.bridge.manifest import ManifestError
from jaxrl.bridge.store import delta, slots, version
from jaxrl.bridge.store.chunks import split
from jaxrl.bridge.store.newest import Newest
from jaxrl.bridge.store.objects import MissingObjectError, Objects, Store, StoreError
from jaxrl.bridge.store.version import StoredChunk

_THREADS = 16  # concurrent requests
_TRIES = 3  # for an object that arrives damaged or is not there yet, as behind a cache
_PAUSE = 0.2  # seconds before the second try of a missing object; doubles
_LONGEST = 500  # characters of an error
# Seconds without a byte from the store after which a request is answered, though the fetch goes on.
# The first time-out of the store's client and half of the second.
_PATIENCE = 10.0
_TICK = 0.01  # seconds between two looks at least
_PROBES = 5.0  # seconds between attempts to reach a store that has not answered for minutes


class _MissingError(Exception):
    """The version cannot be rebuilt from the objects of the store and the chunks of this host."""


class _SilentError(Exception):
    """The store does not answer."""


class StoreAgent:
    """Fetches versions into slots below a directory.

    A fetch goes on when the store does not answer and the request for it has been told so.
    """

    def __init__(self, root: Path, *, key: str | None) -> None:
        """Keeps the slots that an earlier agent left in the directory."""
        self._root = root
        self._users = threading.Lock()
        self._waiting = collections.Counter[Path]()  # requests for a version in a directory
        self._fetches: dict[Path, Newest[Path | None]] = collections.defaultdict(Newest)
        self._objects = functools.lru_cache(8)(lambda url: Objects(Store(url, key)))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns status and body of the answer to a relay; never raises."""
        try:
            return {"status": 200, "body": {"directory": self._directory(request)}}
        except _SilentError as error:
            why = f"{error}: {request['store']}"
            return {"status": 200, "body": {"behind": why[:_LONGEST]}}
        except ManifestError as error:
            return {"status": 409, "body": {"error": f"{REFUSED} {str(error)[:_LONGEST]}"}}
        except Exception as error:
            return {"status": 502, "body": {"error": f"the agent: {error!r}"[:_LONGEST]}}

    def _directory(self, request: dict[str, Any]) -> str | None:
        """Returns the slot with the requested version. Returns None if the version is needed whole,
        or if the request only reports that the server's learner has left."""
        server = request["server"]
        if "learner" not in request:
            self._leave(server, keep=None)
            return None
        learner = manifest.parse_learner(request["learner"])
        directory = slots.slots_directory(self._root, learner, group=request["group"])
        with self._users:  # requests of several servers that come together share a fetch
            slots.enter(directory, server=server)
            objects, fetches = self._objects(request["store"]), self._fetches[directory]
        if objects.keyed is not request["keyed"]:
            raise ManifestError(f"the learner and jaxrl serve must both have {KEY}, or neither")
        key = {name: value for name, value in request.items() if name != "server"}
        with self._counted(directory):
            found = fetches.submit(key, lambda: self._persist(key, directory, objects))
            while not wait([found], max(_TICK, _PATIENCE - objects.silence.seconds)).done:
                if (silent := objects.silence.seconds) >= _PATIENCE:
                    raise _SilentError(f"the store has not answered its host for {silent:.0f} s")
        if (slot := found.result()) is None:
            return None
        self._leave(server, keep=directory)
        return str(slot)

    @contextlib.contextmanager
    def _counted(self, directory: Path) -> Iterator[None]:
        """Counts a request that waits."""
        with self._users:
            self._waiting[directory] += 1
        try:
            yield
        finally:
            with self._users:
                self._waiting[directory] -= 1

    def _persist(self, request: dict[str, Any], directory: Path, objects: Objects) -> Path | None:
        """Returns the slot with the requested version, None if it is needed whole.

        Tries again while the store does not answer, and after a refusal for which no request waits.
        Otherwise raises StoreError, as when a newer version is requested or the last server leaves.
        """
        try:
            while True:
                try:
                    return self._fetch(request, directory, objects)
                except StoreError:
                    waited_for = self._waiting[directory] and not objects.silence.seconds
                    newer = self._fetches[directory].waiting
                    if waited_for or newer or not directory.exists():
                        raise
                time.sleep(_PROBES)
        except _MissingError:
            return None
        finally:
            with self._users:
                slots.remove_unused(directory)

    def _leave(self, server: str, *, keep: Path | None) -> None:
        with self._users:
            others = [path for path in self._root.iterdir() if path != keep]
            slots.leave(others, server=server)

    def _fetch(self, request: dict[str, Any], directory: Path, objects: Objects) -> Path:
        own = slots.complete_slots(directory)
        for slot in own:
            name = version.name(slot.data, version=slot.content.version, digest=objects.digest)
            if name == request["manifest"]:  # for another server of this host
                return slot.directory
        data = _intact(objects, request["manifest"])
        content = version.parse_version(data)
        if content.learner._asdict() != request["learner"]:
            raise ManifestError(f"{request['manifest']} is a version of another learner")
        if own and content.version < own[0].content.version:
            raise ManifestError(
                f"version {content.version} is older than {own[0].content.version}, which the host "
                "has"
            )
        target = slots.next_slot(directory, count=request["slots"])
        # Other learners' slots may hold the same chunks, such as an earlier process of the run.
        others = [path for path in self._root.iterdir() if path != directory]
        known = [*own, *(slot for path in others for slot in slots.complete_slots(path))]
        held = slots.chunks_held(slot for slot in reversed(known) if slot.directory != target)
        chunks = [chunk for file in content.files for chunk in file.chunks]
        if not all(c.whole or c.digest in held or c.base in held for c in chunks):
            raise _MissingError
        outs = [o for file in slots.open_slot(target, content.files) for o in split(file)]
        rebuild = functools.partial(_rebuild, objects=objects, held=held, word=content.word)
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(rebuild, chunks, outs))
        slots.close_slot(target, data)
        return target


def _rebuild(
    chunk: StoredChunk, out: np.ndarray, *, objects: Objects, held: dict[str, np.ndarray], word: int
) -> None:
    """Writes the chunk to `out` and verifies it; raises _MissingError or StoreError."""

    def copy() -> None:
        out[:] = held[chunk.digest]

    def difference() -> None:
        delta.decode(objects.get(chunk.delta_name()), held[chunk.base], out, word=word)

    def whole() -> None:
        out[:] = np.frombuffer(objects.get(chunk.whole_name()), np.uint8)

    ways = [copy] * (chunk.digest in held)
    ways += [difference] * (chunk.base in held) + [whole] * chunk.whole
    if not any(_tried(way, lambda: objects.digest(out.data) == chunk.digest) for way in ways):
        raise _MissingError


def _intact(objects: Objects, name: str) -> bytes:
    """Returns a manifest whose bytes have the digest in its name; raises _MissingError or
    StoreError."""
    found = b""

    def get() -> None:
        nonlocal found
        found = bytes(objects.get(name))

    if not _tried(get, lambda: objects.digest(found) == version.digest_in(name)):
        raise _MissingError
    return found


def _tried(get: Callable[[], None], right: Callable[[], bool]) -> bool:
    """Gets an object up to `_TRIES` times until it is right; tells whether it is. Raises StoreError
    unless the object was damaged or missing."""
    for i in range(_TRIES):
        try:
            get()
        except MissingObjectError:
            time.sleep(_PAUSE * 2**i if i + 1 < _TRIES else 0)
            continue
        except ValueError:  # damaged on the way: not compressed, or another size
            continue
        if right():
            return True
    return False


class _Handler(socketserver.StreamRequestHandler):
    """Answers one request."""

    def handle(self) -> None:
        """Reads a line and writes a line."""
        assert isinstance(self.server, _Server)
        answer = self.server.agent.answer(json.loads(self.rfile.readline()))
        self.wfile.write(json.dumps(answer).encode() + b"\n")


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: Path, agent: StoreAgent) -> None:
        path.unlink(missing_ok=True)
        super().__init__(str(path), _Handler)
        self.agent = agent


def main() -> None:
    """Answers requests until standard input closes."""
    directory = Path(sys.argv[1])
    root = directory / PAYLOADS
    root.mkdir(mode=0o700, exist_ok=True)
    server = _Server(directory / SOCKET, StoreAgent(root, key=os.environ.get(KEY)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
