"""Incremental reader of a growing metrics.jsonl."""

from pathlib import Path
from typing import Any

from jaxrl.monitoring.tracking.tracking import parse_entry


class Tail:
    """Entries of a JSON-lines file that another program appends to or replaces."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._entries: list[dict[str, Any]] = []
        self._end, self._last = 0, b""  # offset read so far, and the line that ends there

    def read(self) -> list[dict[str, Any]]:
        """Returns all entries so far, none without a file; an unfinished line waits.

        Raises:
          ValueError: for a line that is not an entry.
        """
        if not self._path.exists():
            self._forget()
            return []
        with self._path.open("rb") as file:
            # A rollback or a resume replaces the file, and the last line is gone.
            file.seek(self._end - len(self._last))
            if file.read(len(self._last)) != self._last:
                self._forget()
                file.seek(0)
            lines = file.read().splitlines(keepends=True)
        for line in lines:
            if line.endswith(b"\n"):
                self._entries.append(self._parsed(line))
                self._end, self._last = self._end + len(line), line
        return self._entries

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            return parse_entry(line)
        except (ValueError, RecursionError) as error:
            number = len(self._entries) + 1
            raise ValueError(f"{self._path}:{number}: not an entry: {error}") from None
