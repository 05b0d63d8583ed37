"""Payloads on a server's host, in memory that its servers share.

Every learner has its own slots: one that servers may read, and one to fill. Their records lie
beside them, so a restarted agent continues where a killed one stopped.
"""

import contextlib
import hashlib
import mmap
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrl.bridge import manifest, payload
from jaxrl.bridge.base import LearnerIdentity
from jaxrl.bridge.manifest import ManifestError
from jaxrl.bridge.store import version
from jaxrl.bridge.store.chunks import split
from jaxrl.bridge.store.version import StoredFile, StoredVersion

_RECORD = ".stored"  # the manifest from the store, in a slot that is complete
_DRAFT = f".{manifest.FILE}"  # the payload's manifest, in a slot that is not complete
_USERS = "users"  # directory with an empty file for each server


class Slot(NamedTuple):
    """A complete slot."""

    directory: Path
    data: bytes  # the manifest in the store
    content: StoredVersion
    order: int  # of its completion among the directory's slots


def slots_directory(root: Path, learner: LearnerIdentity, *, group: str) -> Path:
    """Returns the directory of a learner's slots for one kind of files."""
    text = f"{learner.name}\n{learner.session}\n{group}"
    return root / hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def enter(directory: Path, *, server: str) -> None:
    """Records that a server uses a directory of slots; creates the directory if it is missing."""
    users = directory / _USERS
    users.mkdir(mode=0o700, parents=True, exist_ok=True)
    (users / server).touch()


def leave(directories: Iterable[Path], *, server: str) -> None:
    """Records that a server no longer uses these directories; removes those without a user."""
    for directory in directories:
        users = directory / _USERS
        if (users / server).exists():
            (users / server).unlink()
            if not any(users.iterdir()):
                shutil.rmtree(directory, ignore_errors=True)


def remove_unused(directory: Path) -> None:
    """Removes what was still written to a directory while its last user left."""
    if not (directory / _USERS).exists():
        shutil.rmtree(directory, ignore_errors=True)


def complete_slots(directory: Path) -> list[Slot]:
    """Returns the complete slots of a directory, the newest first."""
    found = []
    for path in directory.glob("slot-*"):
        with contextlib.suppress(OSError, ManifestError):
            data = (path / _RECORD).read_bytes()
            content = version.parse_version(data)
            found.append(Slot(path, data, content, (path / _RECORD).stat().st_mtime_ns))
    return sorted(found, key=lambda slot: -slot.order)


def next_slot(directory: Path, *, count: int) -> Path:
    """Returns the slot to fill among `count`: an incomplete one, else the oldest."""
    orders = {slot.directory: slot.order for slot in complete_slots(directory)}
    paths = [directory / f"slot-{i}" for i in range(count)]
    return min(paths, key=lambda path: orders.get(path, 0))


def open_slot(slot: Path, files: Sequence[StoredFile]) -> list[np.ndarray]:
    """Marks a slot as incomplete and returns the writable bytes of its files; raises OSError as
    `payload.map_writable`."""
    slot.mkdir(mode=0o700, exist_ok=True)
    (slot / _RECORD).unlink(missing_ok=True)
    names = [_DRAFT if file.name == manifest.FILE else file.name for file in files]
    for path in slot.iterdir():  # the payload's manifest among them, before a byte changes
        if path.name not in names:
            path.unlink()
    return [
        payload.map_writable(slot / name, file.nbytes)
        for name, file in zip(names, files, strict=True)
    ]


def close_slot(slot: Path, data: bytes) -> None:
    """Marks a filled slot as complete; `data` is the manifest from the store."""
    if (slot / _DRAFT).exists():  # adapters have none
        (slot / _DRAFT).replace(slot / manifest.FILE)
    draft = slot / f"{_RECORD}-draft"
    draft.write_bytes(data)
    # The record's time counts completions: a clock may step back.
    order = 1 + max((one.order for one in complete_slots(slot.parent)), default=0)
    os.utime(draft, ns=(order, order))
    draft.replace(slot / _RECORD)


def chunks_held(slots: Iterable[Slot]) -> dict[str, np.ndarray]:
    """Returns the chunks of complete slots by digest; the caller must verify the bytes, which may
    be damaged or change."""
    found: dict[str, np.ndarray] = {}
    for slot in slots:
        for file in slot.content.files:
            with contextlib.suppress(OSError, ValueError):
                parts = split(_map_read(slot.directory / file.name))
                digests = [chunk.digest for chunk in file.chunks]
                found |= zip(digests, parts, strict=False)
    return found


def _map_read(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
