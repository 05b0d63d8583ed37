"""Files that other processes read while they are written."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file that others may read meanwhile. It is replaced, not cut in place: they, and a
    program that is killed here, find either the old file or the new one."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
