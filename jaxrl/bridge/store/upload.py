"""Learner's side of a store: writes the changes of each version."""

import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from typing import Any

import numpy as np

from jaxrl.bridge.base import LearnerIdentity
from jaxrl.bridge.store import chunks, delta, version
from jaxrl.bridge.store.objects import Objects, Store
from jaxrl.bridge.store.version import StoredChunk, StoredFile, StoredVersion

_THREADS = 16  # they mostly wait for the store

CompleteOthers = Callable[..., Sequence[StoredFile]]
"""(again=...) -> files that other processes have written whole."""


def _no_others(*, again: bool) -> Sequence[StoredFile]:
    del again
    return ()


_NOTHING = np.zeros(0, np.uint8)


def run_place(store: Store, learner: LearnerIdentity) -> Store:
    """Returns the place of all processes of a learner's run, earlier ones included."""
    run = hashlib.blake2b(learner.name.encode(), digest_size=8).hexdigest()
    return store.below(f"jaxrl-{run}")


def make_place(store: Store, *, learner: LearnerIdentity, group: str) -> Store:
    """Returns the place of a learner's session and group; creates it in a file:// store."""
    place = run_place(store, learner).below(f"{learner.session}-{group}")
    place.make()
    return place


class FileWriter:
    """Successive versions of some files.

    An unchanged chunk keeps its objects. A changed one is written as a difference, or whole if that
    is smaller or there is no base. `complete` adds the chunks that an agent without the base needs.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._files: tuple[StoredFile, ...] = ()  # of the last version
        self._data: dict[str, np.ndarray] = {}  # their bytes

    def write(self, files: Mapping[str, np.ndarray], *, word: int) -> tuple[StoredFile, ...]:
        """Writes a version, as `Upload.write`; raises StoreError."""
        held = {file.name: file.chunks for file in self._files}

        def put(chunk: np.ndarray, base: np.ndarray, old: StoredChunk | None) -> StoredChunk:
            digest = self._objects.digest(chunk.data)
            if old is not None and old.digest == digest:
                return old
            if old is not None and base.size == chunk.size:
                difference = delta.encode(chunk, base, word=word)
                if len(difference) < chunk.nbytes:
                    made = StoredChunk(digest, old.digest, whole=False)
                    self._objects.put(made.delta_name(), difference)
                    return made
            return self._put_whole(chunk, StoredChunk(digest, "", whole=False))

        with ThreadPoolExecutor(_THREADS) as pool:
            jobs: dict[str, Iterator[StoredChunk]] = {}  # all files at once
            for name, data in files.items():
                bases = chain(chunks.split(self._data.get(name, _NOTHING)), repeat(_NOTHING))
                olds = chain(held.get(name, ()), repeat(None))
                jobs[name] = pool.map(put, chunks.split(data), bases, olds)
            stored = tuple(
                StoredFile(name, files[name].nbytes, tuple(made)) for name, made in jobs.items()
            )
        self._files, self._data = stored, dict(files)
        return stored

    def complete(self, *, again: bool = False) -> tuple[StoredFile, ...]:
        """Writes the last version's chunks that the store lacks whole, or all of them `again`;
        raises StoreError."""
        put = functools.partial(self._put_whole, again=again)
        with ThreadPoolExecutor(_THREADS) as pool:
            self._files = tuple(
                file._replace(
                    chunks=tuple(pool.map(put, chunks.split(self._data[file.name]), file.chunks))
                )
                for file in self._files
            )
        return self._files

    def _put_whole(
        self, data: np.ndarray, chunk: StoredChunk, *, again: bool = False
    ) -> StoredChunk:
        if again or not chunk.whole:
            self._objects.put(chunk.whole_name(), data.data)
        return chunk._replace(whole=True)


class Upload:
    """Successive versions of a set of files, some of which other processes may write.

    Objects are deleted once neither of the last two versions names them.
    """

    def __init__(
        self, store: Store, *, learner: LearnerIdentity, group: str, slots: int = 2
    ) -> None:
        """Makes the place of this learner's session and group; raises StoreError as `Objects`. Each
        host has `slots` slots: the last versions, and one to fill."""
        place = make_place(store, learner=learner, group=group)
        self.objects = Objects(place)
        self._run = Objects(run_place(store, learner))
        self._writer = FileWriter(self.objects)
        about = {"store": place.url, "keyed": self.objects.keyed, "group": group, "slots": slots}
        self._request: dict[str, Any] = about
        self._learner = learner
        self._current = StoredVersion(0, learner, 2, ())
        self._complete_others: CompleteOthers = _no_others
        self._named: list[set[str]] = []  # objects of the last versions
        self._lock, self._completed = threading.Lock(), set[bool]()

    def remove_earlier(self) -> None:
        """Deletes objects that killed processes of the same run left; call it once the servers have
        admitted this process."""
        own = self._learner.session
        self._run.delete([name for name in self._run.names() if not name.startswith(own)])
        self._run.delete_drafts(but=own)

    def write(
        self,
        files: Mapping[str, np.ndarray],
        *,
        number: int,
        word: int,
        others: Sequence[StoredFile] = (),
        complete_others: CompleteOthers = _no_others,
    ) -> dict[str, Any]:
        """Writes a version and returns the request that fetches it.

        Args:
          files: u8[N] of each file, by name; they must not change before the next call returns.
          number: number of the version.
          word: bytes of a number in the files.
          others: further files of the version, already in the store.
          complete_others: writes those whole, as `FileWriter.complete`.

        Raises StoreError; the last version then stays the base.
        """
        stored = (*others, *self._writer.write(files, word=word))
        self._record(StoredVersion(number, self._learner, word, stored))
        self._complete_others, self._completed = complete_others, set[bool]()
        return self._request

    def complete(self, *, again: bool = False) -> dict[str, Any]:
        """Writes the last version's chunks that the store lacks whole, or all of them `again` if
        the store has lost or damaged some, and returns the request that fetches it; raises
        StoreError. Several threads may call it."""
        with self._lock:
            if again not in self._completed:
                others = self._complete_others(again=again)
                files = (*others, *self._writer.complete(again=again))
                self._record(self._current._replace(files=files), again=again)
                self._completed.add(again)
            return self._request

    def close(self) -> None:
        """Deletes all objects."""
        named = set[str]().union(*self._named)
        self.objects.delete(sorted(named.union(self.objects.names())))

    def _record(self, made: StoredVersion, *, again: bool = False) -> None:
        """Writes a manifest, and deletes objects that neither of the last two versions names."""
        data = version.dump(made)
        name = version.name(data, version=made.version, digest=self.objects.digest)
        self.objects.put(name, data)
        kept = made.objects() | {name}
        if made.version == self._current.version and self._named:
            kept |= self._named.pop()
        old = self._named[:-1]
        self._named = [*self._named[-1:], kept]
        self.objects.delete(sorted(set[str]().union(*old) - set[str]().union(*self._named)))
        self._current = made
        # A request with `again` is not the one that an agent may still be working on.
        self._request = {**self._request, "manifest": name, "again": again}
