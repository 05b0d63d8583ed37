"""A run directory in a bucket: the run writes to a mirror of it on this machine.

While the run trains, a thread uploads what has changed: every checkpoint once it is complete, the
logs about twice a minute, and all that is left at the end. Objects come first, then the list that
names them (`manifest`), so the bucket always holds the run as it was at one moment, from which any
machine can resume it. An upload that fails is tried again; the run does not wait for it.
"""

import fcntl
import functools
import os
import re
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from jaxrl.bridge import Bucket, StoreError
from jaxrl.config.bucket import is_bucket, local_directory
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.config.training import Config
from jaxrl.core import Hosts
from jaxrl.training.manifest import NAME, Entry, Lease, LostError
from jaxrl.training.run_directory import ResumeError
from jaxrl.training.snapshot import AT_END, CHECKPOINTS, BusyError, steps, take

C = TypeVar("C", bound=Config | SupervisedConfig)
P = ParamSpec("P")
R = TypeVar("R")

_POLL = 0.5  # seconds between two looks for a new checkpoint
_LOGS = 30.0  # seconds between two uploads of logs, which are uploaded whole
_SHARE = 10  # the pause is at least this many times as long as the upload before it
_AGAIN = 10.0  # seconds until an upload that failed is tried again
_THREADS = 8
# Names of objects that are never written again. Nothing resumes from the files in other folders:
# they keep their names, so that other programs can read a model where it is.
_VERSION = re.compile(r"(checkpoints/\d+/.+|[^/]+)\\.v[0-9a-f]{8}")


def mirrored(train: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Wraps a function that trains, so that its `run_dir` may lie in a bucket.

    Raises:
      ResumeError: if another program trains there.
      StoreError: if the bucket cannot be used, or the last upload failed.
    """

    @functools.wraps(train)
    def call(config: C, *args: P.args, **options: P.kwargs) -> R:
        if not is_bucket(config.run_dir):
            return train(config, *args, **options)
        hosts = Hosts()
        with ExitStack() as stack:
            hosts.on_leader(lambda: stack.enter_context(_open(config.run_dir)))
            return train(config, *args, **options)

    return call


@contextmanager
def _open(url: str) -> Iterator[None]:
    """Takes a run of a bucket, brings its files, and uploads them until the end of the block."""
    directory = local_directory(url)
    root = directory.parent
    root.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        descriptor = os.open(root, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResumeError(
                f"another program on this machine trains in {url}; wait until it ends, or choose "
                "another run_dir"
            ) from None
        except OSError:  # a file system without locks
            pass
        pool = stack.enter_context(ThreadPoolExecutor(_THREADS))
        mirror = _Mirror(url, root=root, directory=directory, pool=pool)
        with mirror:
            yield


class _Mirror:
    """Uploads a run from a thread of its own, within its `with` block."""

    def __init__(self, url: str, *, root: Path, directory: Path, pool: ThreadPoolExecutor) -> None:
        """Takes the run and brings its files, unless the last program that wrote it did so here."""
        self._url, self._directory, self._pool = url, directory, pool
        self._staging, session = root / ".upload", root / ".session"
        partly = root / ".partly"  # exists while files are missing here
        last = session.read_text(encoding="utf-8") if session.exists() else None
        try:
            self._bucket = Bucket(url)
            self._lease = Lease(self._bucket, last=last)
        except StoreError as error:
            raise StoreError(_unusable(url, error)) from error
        self._sent = dict(self._lease.manifest.files)  # by path, also what no list names yet
        self._objects = {entry.object for entry in self._sent.values()}
        if last is None or self._lease.before != last or not directory.exists():
            partly.touch()
        session.write_text(self._lease.manifest.session, encoding="utf-8")
        if partly.exists():
            shutil.rmtree(directory, ignore_errors=True)
            self._bring()
            partly.unlink()
        self._steps = steps(directory)
        found = filter(_VERSION.fullmatch, self._bucket.names())
        self._bucket.delete(sorted(set(found) - self._objects))  # of a killed program
        self._next = time.monotonic() + _LOGS
        self._ended, self._failing = threading.Event(), False
        self._lost: LostError | None = None
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._lost is not None:
            raise self._lost
        try:
            self._upload(ended=True)
            self._lease.write(training=False)
            if not self._lease.manifest.files:
                self._bucket.delete([NAME])
        except (StoreError, BusyError) as error:
            text = (
                f"{self._url}: the last upload failed, so the bucket holds an earlier state of the "
                f"run: {error}. All of it is in {self._directory}: rerun the same command on this "
                "machine, which uploads it"
            )
            if kind is None:
                raise StoreError(text) from error
            _note(text)

    def _bring(self) -> None:
        """Downloads the files of the run."""
        named = self._lease.manifest.files.items()
        files = {path: entry for path, entry in named if _is_state(path)}
        if not files:
            return
        _note(f"{self._url}: fetching {len(files)} files to {self._directory}")
        parts: list[Future[None]] = []
        for path, entry in files.items():
            place = self._directory / path
            parts += self._bucket.download(entry.object, place, size=entry.size, pool=self._pool)
        try:
            self._wait(parts)
        except StoreError as error:
            raise StoreError(_unusable(self._url, error)) from error
        for path, entry in files.items():
            os.utime(self._directory / path, ns=(entry.mtime, entry.mtime))

    def _work(self) -> None:
        while not self._ended.wait(_POLL):
            try:
                if self._due():
                    self._upload()
                self._lease.beat()
            except LostError as error:
                self._lost = error
                _note(str(error))
                os.kill(os.getpid(), signal.SIGTERM)  # the run ends as after any signal
                return
            except (StoreError, BusyError, OSError) as error:
                if not self._failing:
                    _note(f"{self._url}: an upload failed and will be tried again: {error}")
                self._failing = True
                self._next = time.monotonic() + _AGAIN
            else:
                if self._failing:
                    _note(f"{self._url}: uploads work again")
                self._failing = False

    def _due(self) -> bool:
        new = not self._failing and steps(self._directory) != self._steps
        return new or time.monotonic() >= self._next

    def _upload(self, *, ended: bool = False) -> None:
        """Uploads what has changed, then the list of files; deletes what the list no longer has."""
        start, now, config = time.monotonic(), steps(self._directory), "config.toml"
        if config in self._lease.manifest.files and not (self._directory / config).exists():
            raise BusyError(f"{self._directory} has lost its files; the bucket keeps its own")
        shutil.rmtree(self._staging, ignore_errors=True)
        self._staging.mkdir()
        files, others = take(self._directory, self._staging, sent=self._sent, ended=ended)
        parts = []
        for path, taken in others.items():
            name = path
            if _is_state(path):
                name = f"{path}.v{secrets.token_hex(4)}"
            entry = taken.entry.model_copy(update={"object": name})
            self._objects.add(name)
            parts.append(self._pool.submit(self._send, taken.path, path, entry))
            files[path] = entry
        self._wait(parts)
        shutil.rmtree(self._staging, ignore_errors=True)
        for path, entry in self._lease.manifest.files.items():
            folder = path.partition("/")[0]
            here = folder in AT_END and ended and (self._directory / folder).exists()
            if not (_is_state(path) or here):  # of an earlier start, perhaps on another machine
                files.setdefault(path, entry)
        if files != self._lease.manifest.files:
            self._lease.write(files)
        current = {entry.object for entry in files.values()}
        self._bucket.delete(sorted(self._objects - current))
        self._sent, self._objects, self._steps = dict(files), current, now
        self._next = time.monotonic() + max(_LOGS, _SHARE * (time.monotonic() - start))

    def _send(self, file: Path, path: str, entry: Entry) -> None:
        self._bucket.upload(file, entry.object)
        self._sent[path] = entry  # so that it need not be sent again if another file fails

    def _wait(self, parts: Sequence[Future[None]]) -> None:
        """Waits for all parts, with signs of life meanwhile; raises the first error."""
        running = set(parts)
        while running:
            running = wait(running, timeout=1.0).not_done
            self._lease.beat()
        for part in parts:
            part.result()


def _is_state(path: str) -> bool:
    """Tells if a resumed run needs a file."""
    return "/" not in path or path.startswith(f"{CHECKPOINTS}/")


def _unusable(url: str, error: StoreError) -> str:
    return (
        f"run_dir = {url!r} cannot be used: {error}. The bucket must exist, and the environment "
        "must hold credentials that may read, write, list and delete there (docs/buckets.md)"
    )


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
