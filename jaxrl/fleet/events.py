"""Events of a fleet, in run_dir/fleet.jsonl, and the output of a part as it grows."""

import codecs
import contextlib
import fcntl
import json
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

FILE = "fleet.jsonl"
_POLL = 0.2  # seconds between two looks at a file
_UP = {"server": "ready"}  # the event after which a part is no longer down; of others "started"


class Events(contextlib.AbstractContextManager["Events"]):
    """Writes and shows what happens to the parts of a fleet. The file is locked until the end of
    the block."""

    def __init__(self, directory: Path, note: Callable[[str], None]) -> None:
        """Begins the file anew; a killed fleet may have left half a line. `directory` is the run's,
        `note` shows a line to the user.

        Raises:
          ValueError: if another fleet uses the directory.
        """
        self._file, self.note = (directory / FILE).open("a", encoding="utf-8"), note
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(
                f"the fleet of another command trains in {directory}; wait until it ends, or "
                "choose another run_dir"
            ) from None
        except OSError:
            pass  # a file system without locks
        self._file.truncate(0)

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, part: str, event: str, **more: Any) -> None:
        """Records an event of a part, such as "server 0"."""
        entry = {"time": round(time.time(), 3), "part": part, "event": event} | more
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def begin(self, asked: str) -> None:
        """Records the request of the fleet, and the host of the command that runs it."""
        self.write("fleet", "asked", text=asked, host=platform.node())


def ending(directory: Path) -> str | None:
    """Describes the end of a run's last fleet, such as "ended with status 0"; None while it runs,
    if the run has no fleet, or if that cannot be told, because its command ran on another host and
    was killed."""
    try:
        with (directory / FILE).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            except OSError:
                locks = False
            else:
                locks = True
            entries = [parse_event(line) for line in file if line.endswith(b"\n")]
    except FileNotFoundError:
        return None
    last = next((e for e in reversed(entries) if (e["part"], e["event"]) == ("fleet", "ended")), {})
    if last:
        return f"ended with status {last.get('status')}"
    here = bool(entries) and entries[0].get("host") == platform.node()
    return "was killed" if locks and here else None


def parse_event(line: bytes) -> dict[str, Any]:
    """Reads a line of the file; raises ValueError for one that is no event."""
    entry = json.loads(line)
    if not isinstance(entry, dict) or not {"part", "event"} <= entry.keys():
        raise ValueError("expected an object with a part and an event")
    return entry


def summary(entries: Sequence[dict[str, Any]]) -> str | None:
    """Describes the last fleet of a run by its events, such as "fleet: 2 servers (GPU 1 each); 1
    death; down: server 0"; None without a fleet."""
    begun = next((entry for entry in entries if entry["event"] == "asked"), None)
    if begun is None:
        return None
    down, deaths, asked = set[str](), 0, dict[str, int]()
    for entry in entries:
        if entry["event"] == "died":
            down.add(entry["part"])
            deaths += 1
        elif entry["event"] in ("removed", _UP.get(entry["part"].partition(" ")[0], "started")):
            down.discard(entry["part"])
        elif entry["event"] == "resized":
            asked |= {kind: entry[kind] for kind in ("servers", "workers") if kind in entry}
    numbers = ", ".join(f"{number} {kind}" for kind, number in sorted(asked.items()))
    resized = f"; {numbers} asked for since" if numbers else ""
    lost = f"; down: {', '.join(sorted(down))}" if down else ""
    plural = "s" * (deaths != 1)
    return f"fleet: {begun.get('text')}{resized}; {deaths} death{plural}{lost}"


@contextmanager
def followed(path: Path, stream: TextIO) -> Iterator[None]:
    """Copies what is appended to a file to a stream, for the block and what it leaves behind."""
    start = path.stat().st_size if path.exists() else 0
    over = threading.Event()
    # A look may end within a character.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def copy() -> None:
        place = start
        while True:
            last = over.wait(_POLL)
            if path.exists():
                with path.open("rb") as file:
                    file.seek(place)
                    found = file.read()
                place += len(found)
                if found:
                    stream.write(decoder.decode(found))
                    stream.flush()
            if last:
                return

    thread = threading.Thread(target=copy, name=f"follows {path.name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(5)
