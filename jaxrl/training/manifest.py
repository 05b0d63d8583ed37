"""The list of a run's files in a bucket, which is also the lock of the run.

The object `run.json` names all objects of a run. It is written after them, so a reader finds the
run as it was at one moment. A program that trains rewrites it every few seconds, unless another one
has: so a second program sees that the first one lives, and one that was taken for dead stops.
"""

import os
import secrets
import socket
import sys
import threading
import time

from pydantic import BaseModel, ConfigDict, ValidationError

from jaxrl.bridge import Bucket, Known, ReplacedError
from jaxrl.training.run_directory import ResumeError

NAME = "run.json"
_BEAT = 10.0  # seconds between two signs of life
_SILENCE = 45.0  # seconds without one, after which a program is taken for dead


class LostError(ResumeError):
    """Another program has taken the run over."""


class Entry(BaseModel):
    """A file of a run in the bucket."""

    model_config = ConfigDict(frozen=True)
    object: str  # name of the object that holds it
    size: int  # bytes
    mtime: int  # ns; with the size, it tells if the file in a mirror is the same


class Manifest(BaseModel):
    """The content of `run.json`."""

    model_config = ConfigDict(frozen=True)
    session: str  # names the program that wrote it
    holder: str  # the same in words
    training: bool = True  # false after the program has ended in order
    beat: int = 0  # grows with each writing
    files: dict[str, Entry] = {}  # by path in the run directory


def read_manifest(bucket: Bucket) -> tuple[Manifest, Known] | None:
    """Reads the files of a run; None if the bucket has no run there.

    Raises:
      StoreError: if the bucket refuses or does not answer.
      ValueError: for an object of that name that is not a run's.
    """
    known = bucket.read(NAME)
    if known is None:
        return None
    try:
        found = Manifest.model_validate_json(known.data)
    except ValidationError as error:
        raise ValueError(
            f"{bucket.url}/{NAME} is not the list of a run's files: {error.errors()[0]['msg']}; "
            "choose another run_dir"
        ) from None
    for path in found.files:
        if path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"{bucket.url}/{NAME} names {path!r}, which is outside of the run")
    return found, known


class Lease:
    """The right to write a run in a bucket.

    Attributes:
      manifest: as it was written last.
    """

    def __init__(self, bucket: Bucket, *, last: str | None) -> None:
        """Takes the run of a bucket. If a program on another machine holds it, waits to see if that
        one lives. `last` is the session of the last program here, which has ended.

        Raises:
          ResumeError: if another program trains there.
          StoreError, ValueError: as `read_manifest`.
        """
        self._bucket, self._lock, found = bucket, threading.Lock(), read_manifest(bucket)
        if found is not None and found[0].training and found[0].session != last:
            _wait(bucket, *found)
        self.before = None if found is None else found[0].session
        self._known = None if found is None else found[1]
        self.manifest = Manifest(
            session=secrets.token_hex(8),
            holder=f"process {os.getpid()} on {socket.gethostname()}",
            files={} if found is None else found[0].files,
        )
        try:
            self._put(self.manifest)
        except LostError:
            raise ResumeError(_taken(bucket, "another program")) from None

    def write(self, files: dict[str, Entry] | None = None, *, training: bool = True) -> None:
        """Writes the files, or the same ones again; `training` is false at the end.

        Raises:
          LostError: if another program has taken the run over.
          StoreError: if the bucket refuses or does not answer.
        """
        with self._lock:
            change = {"beat": self.manifest.beat + 1, "training": training}
            if files is not None:
                change |= {"files": files}
            self._put(self.manifest.model_copy(update=change))

    def beat(self) -> None:
        """Shows that this program lives, if it is time; raises as `write`."""
        if time.monotonic() - self._written >= _BEAT:
            self.write()

    def _put(self, manifest: Manifest) -> None:
        data = manifest.model_dump_json().encode()
        try:
            self._known = self._bucket.replace(NAME, data, seen=self._known)
        except ReplacedError:
            found = read_manifest(self._bucket)
            # An earlier try of this one, given up as lost, may have arrived.
            if found is None or found[0].session != manifest.session:
                holder = "another program" if found is None else found[0].holder
                raise LostError(
                    f"{self._bucket.url}: {holder} has taken the run over; this one stops"
                ) from None
            self._known = self._bucket.replace(NAME, data, seen=found[1])
        self.manifest, self._written = manifest, time.monotonic()


def _wait(bucket: Bucket, found: Manifest, known: Known) -> None:
    """Waits until a program that holds a run has been silent for long enough; raises ResumeError if
    it is not."""
    print(
        f"{bucket.url} was left by {found.holder} without an end; waiting {_SILENCE:.0f} s to see "
        "if it still trains",
        file=sys.stderr,
        flush=True,
    )
    until = time.monotonic() + _SILENCE
    while time.monotonic() < until:
        time.sleep(min(1.0, _SILENCE / 5))
        if (now := bucket.read(NAME)) is None or now.data != known.data:
            raise ResumeError(_taken(bucket, found.holder))


def _taken(bucket: Bucket, holder: str) -> str:
    return f"{holder} trains in {bucket.url}; wait until it ends, or choose another run_dir"
