"""Atomic replacement of files that other processes read."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replaces a file atomically. Readers see the old content or the new one, even if the writer is
    killed."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
