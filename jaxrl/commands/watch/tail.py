"""A growing metrics.jsonl, of which only what was appended is read again."""

import json
from pathlib import Path
from typing import Any


class Tail:
    """The entries of a file of JSON lines that a program appends to, or replaces."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._entries: list[dict[str, Any]] = []
        self._end, self._last = 0, b""  # of what was read, and the line that ends there

    def read(self) -> list[dict[str, Any]]:
        """All entries so far; none if there is no file. A line without its end is left for later.

        Raises:
          ValueError: for a line that is no JSON.
        """
        if not self._path.exists():
            self._forget()
            return []
        with self._path.open("rb") as file:
            # A run that goes back, or on, replaces the file: the line is then not there any more.
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
            return json.loads(line)
        except ValueError as error:
            number = len(self._entries) + 1
            raise ValueError(f"{self._path}:{number}: not JSON: {error}") from None
