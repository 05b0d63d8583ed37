"""Ends a server together with the process that started it, and removes the server's shared memory
and temporary files.

`launch.py` runs this program, which uses the standard library only. Its arguments are the list of
belongings of an owned directory in /dev/shm, an owned directory for temporary files, the
descriptors of their locks, and the server's command. Its standard input is a pipe that closes when
the starting process ends, even by SIGKILL; the whole process group then gets SIGTERM and later
SIGKILL. The kernel's PR_SET_PDEATHSIG would watch the starting thread instead and would not reach
the server's workers.

The server's segments and semaphores are listed as belongings. If this process is killed too, the
next server or learner that starts removes them.

The exit status is the server's, or 128 + N if signal N ended it.
"""

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

GRACE = 15.0  # seconds between SIGTERM and SIGKILL
_POLL = 0.2  # seconds between two checks of the server
_YOUNG = 5.0  # seconds in which a process maps a new segment
# Names that Python, vLLM and torch give to shared memory, and glibc to semaphores.
_SEGMENT = re.compile(r"(?:psm_|sem\.|vllm|torch_)[^/\n]+")


class Segments:
    """Shared memory of this process group.

    A file counts if it lies beside the owned directory, is younger than this object, belongs to the
    same user and is mapped by a process of the group.
    """

    def __init__(self, belongings: Path) -> None:
        """Ignores older files; `belongings` is the owned directory's list."""
        self._list, self._shared = belongings, belongings.parent.parent
        self._start = self._looked = time.time() - 1
        self._found: dict[str, int] = {}  # inodes

    def record(self) -> None:
        """Adds new files to the belongings, however long the last call was ago."""
        now = time.time()
        young = dict(self._younger_than(self._looked - _YOUNG))
        self._looked = now
        if not young:
            return
        mapped = _mapped(f"{self._shared}/")
        new = {name: inode for name, inode in young.items() if inode in mapped}
        if new:
            with self._list.open("a") as file:
                file.writelines(f"{inode} {name}\n" for name, inode in new.items())
            self._found |= new

    def remove(self) -> None:
        """Removes the belongings and the directory."""
        for name, inode in self._found.items():
            file = self._shared / name
            with contextlib.suppress(OSError):
                if file.lstat().st_ino == inode:
                    file.unlink()
        shutil.rmtree(self._list.parent, ignore_errors=True)

    def _younger_than(self, moment: float) -> Iterator[tuple[str, int]]:
        for entry in os.scandir(self._shared):
            if entry.name not in self._found and _SEGMENT.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    state = entry.stat(follow_symlinks=False)
                    young = max(self._start, moment) < state.st_ctime
                    if young and state.st_uid == os.getuid():
                        yield entry.name, state.st_ino


def _mapped(prefix: str) -> set[int]:
    """Returns the inodes that the other processes of this group map from files below `prefix`."""
    found: set[int] = set()
    for process in _others():
        with contextlib.suppress(OSError), open(f"/proc/{process}/maps") as maps:
            fields = (line.split(maxsplit=5) for line in maps)
            found.update(int(f[4]) for f in fields if len(f) == 6 and f[5].startswith(prefix))
    return found


def members(group: int) -> list[int]:
    """Returns the processes of a group, without those that have ended."""
    found = []
    for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            if os.getpgid(process) == group:
                status = Path(f"/proc/{process}/stat").read_text()
                if status.rpartition(")")[2].split()[0] != "Z":
                    found.append(process)
    return found


def _others() -> list[int]:
    """Returns the other processes of this group."""
    return [process for process in members(os.getpgid(0)) if process != os.getpid()]


def main() -> int:
    """Runs the server until it ends or the pipe closes."""
    belongings, temporary, locks, *command = sys.argv[1:]
    # SIGTERM to the group reaches this process too. Unlike SIG_IGN, a handler is not inherited.
    signal.signal(signal.SIGTERM, lambda *_: None)
    segments = Segments(Path(belongings))
    # The server keeps the locks: if only this process is killed, its segments are in use.
    descriptors = [*map(int, locks.split(","))]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)
    while server.poll() is None:
        segments.record()
        if select.select([sys.stdin], [], [], _POLL)[0]:
            os.killpg(0, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(GRACE)
            break
    segments.record()
    for _ in range(50):  # remaining workers; a process may start others while it is killed
        if not (left := _others()):
            break
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        server.poll()
        time.sleep(0.1)
    segments.remove()
    shutil.rmtree(temporary, ignore_errors=True)
    status = server.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
