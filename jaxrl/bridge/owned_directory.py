"""Directories that belong to a living process, and removal of those that killed processes left.

An owned directory holds a lock file that its owner keeps locked. The kernel releases the lock when
the owner and every process that inherited it have ended, even by SIGKILL. Process ids would not do:
containers that share /dev/shm do not see each other's processes, and ids are used again.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
"""Directory of files in memory, shared by the processes of one machine."""
LOCK = "lock"
BELONGINGS = "belongings"
"""File of an owned directory: a line `inode name` for each file beside the directory that goes with
it."""

_PREFIX = "jaxrl-owned-"


class OwnedDirectory(contextlib.AbstractContextManager["OwnedDirectory"]):
    """A new directory, readable by its user only; removed at the end of its `with` block, or later
    if its owner is killed.

    Attributes:
      path: the directory.
      lock: descriptor of the lock file; processes that inherit it own the directory as well.
    """

    def __init__(self, parent: Path) -> None:
        """Makes the directory below `parent`; removes directories of killed processes there."""
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

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove_leftovers(parent: Path) -> None:
    for directory in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if directory.lstat().st_uid == os.getuid():
                _remove_leftover(directory)


def _remove_leftover(directory: Path) -> None:
    """Removes a directory if it has no owner."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        directory.rmdir()  # its owner ended before the lock was made; fails if it is not empty
        return
    try:
        if _locked(descriptor, directory) is True:
            _remove(directory)
    finally:
        os.close(descriptor)


def _locked(descriptor: int, directory: Path) -> bool | None:
    """Locks a directory's lock file. Returns False if another process holds it or the directory is
    gone, None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(directory / LOCK))
    return False


def _remove(directory: Path) -> None:
    """Removes a locked directory and its belongings; the lock last, so that a later process still
    recognises the directory if this one is killed in between."""
    with contextlib.suppress(OSError):
        for line in (directory / BELONGINGS).read_text(errors="replace").splitlines():
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
