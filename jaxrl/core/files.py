"""Atomic replacement of files that other processes read."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replaces a file atomically: concurrent readers, and a program killed in between, find either
    the old file or the new one."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
