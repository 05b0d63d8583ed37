"""Atomic writes, and reads that refuse anything but regular files."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """Returns jaxrl's part of the user's cache, below `$XDG_CACHE_HOME` or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxrl"


def write_whole(path: Path, text: str) -> None:
    """Replaces a file atomically. Readers see the old content or the new one, even if the writer is
    killed or the machine stops."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)  # left by a killed writer, or a FIFO or a link
    with new.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def read_whole(path: Path) -> bytes | None:
    """Returns the content of a file; None if it does not exist. Raises as `check_regular`."""
    if not os.path.lexists(path):
        return None
    check_regular(path)
    return path.read_bytes()


def check_regular(path: Path) -> None:
    """Checks that a path is a file or a link to one, because reading a FIFO would block; raises
    ValueError if it is not."""
    if path.is_file():
        return
    kind = "a link to nothing" if not path.exists() else "not a regular file"
    if path.is_dir():
        kind = "a directory"
    raise ValueError(f"{path} is {kind}, expected a file; move it away")
