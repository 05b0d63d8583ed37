"""Files that other processes read or that a user may have changed: replaced atomically, read only
if they are regular."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replaces a file atomically. Readers see the old content or the new one, even if the writer is
    killed or the machine stops."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)  # a killed writer's; as a FIFO it would block, as a link lead away
    with new.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def read_whole(path: Path) -> bytes | None:
    """Returns the content of a file; None without one.

    Raises:
      ValueError: as `check_regular`.
      OSError: if it cannot be read.
    """
    if not os.path.lexists(path):
        return None
    check_regular(path)
    return path.read_bytes()


def check_regular(path: Path) -> None:
    """Checks that a path is a file or a link to one; reading a FIFO would block for ever.

    Raises:
      ValueError: if it is not; the message names it.
    """
    if path.is_file():
        return
    kind = "a link to nothing" if not path.exists() else "not a regular file"
    if path.is_dir():
        kind = "a directory"
    raise ValueError(f"{path} is {kind}, expected a file; move it away")
