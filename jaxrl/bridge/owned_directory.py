"""Directories that belong to a living process, and what killed processes left in shared places.

An owned directory holds a lock file that its owner keeps locked. The kernel releases the lock when
the owner and every process that inherited it have ended, however they ended. Process ids would not
do: containers that share /dev/shm do not see each other's processes, and ids are used again.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

MEMORY = Path("/dev/shm")
LOCK = "lock"
BELONGINGS = "belongings"
"""File of an owned directory: files beside the directory that end with it, a line `inode name`
for each."""

_PREFIX = "jaxrl-owned-"


class OwnedDirectory:
    """A new directory, readable by its user only, that ends with its `with` block or is removed
    after its owner was killed.

    Attributes:
      path: the directory.
      lock: descriptor of the lock file; processes that inherit it own the directory as well.
    """

    def __init__(self, parent: Path) -> None:
        """Makes the directory below `parent`, and removes those of killed processes."""
        _remove_leftovers(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            # Another process may take the directory for a leftover before it is locked.
            with contextlib.suppress(FileNotFoundError):
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
                self.lock = os.open(self.path / LOCK, flags, 0o600)
                if _locked(self.lock, self.path) is not False:
                    return
                os.close(self.lock)

    def close(self) -> None:
        """Removes the directory and its belongings."""
        if self.lock >= 0:
            try:
                _remove(self.path)
            finally:
                os.close(self.lock)
                self.lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lock_file(path: Path) -> int | None:
    """Locks a file, which is made if it is missing, and returns its descriptor; None if a living
    process holds the lock. Where the file system has no locks, nothing is locked."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    if _try_lock(descriptor) is False:
        os.close(descriptor)
        return None
    return descriptor


def _remove_leftovers(parent: Path) -> None:
    for directory in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _abandoned(directory):
            _remove(directory)


@contextlib.contextmanager
def _abandoned(directory: Path) -> Iterator[None]:
    """Holds the lock of a directory without an owner; raises OSError if it has one."""
    if directory.lstat().st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user")
    try:
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        directory.rmdir()  # its owner ended before the lock was made; fails if it is not empty
        raise
    try:
        if _locked(descriptor, directory) is not True:
            raise BlockingIOError(f"{directory} is in use")
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int, directory: Path) -> bool | None:
    """Locks the lock file of a directory and tells whether it holds; None without locks."""
    locked = _try_lock(descriptor)
    if locked:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), os.stat(directory / LOCK))
        return False
    return locked


def _try_lock(descriptor: int) -> bool | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks, so nothing is judged by them
        return None
    return True


def _remove(directory: Path) -> None:
    """Removes a locked directory and its belongings, the lock last, so that a kill in between
    leaves something that is recognised."""
    for line in _lines(directory / BELONGINGS):
        inode, _, name = line.partition(" ")
        with contextlib.suppress(OSError, ValueError):
            file = directory.with_name(name)  # an error if the name leads elsewhere
            found = file.lstat()
            if (found.st_ino, found.st_uid) == (int(inode), os.getuid()):
                file.unlink()
    with contextlib.suppress(OSError):
        for item in directory.iterdir():
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item, ignore_errors=True)
            elif item.name != LOCK:
                item.unlink(missing_ok=True)
        (directory / LOCK).unlink(missing_ok=True)
        directory.rmdir()


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []
