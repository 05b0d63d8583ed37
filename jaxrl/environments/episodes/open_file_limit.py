"""The limit on open files: each episode's event loop keeps files open."""

import contextlib
import resource
import threading
from collections.abc import Iterator

_FILES_PER_EPISODE = 3  # that an event loop keeps open
_MOST_FILES = 1 << 16  # some programs loop over every number up to the limit

_changed = threading.Condition()
_open = 0


def max_open_episodes() -> int:
    """Returns the number of episodes that may be open at once, which take half of the process's
    files. Increases the process's soft limit on open files as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY:
        soft = _MOST_FILES
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(1, max(soft, most) // 2 // _FILES_PER_EPISODE)


@contextlib.contextmanager
def reserve_files(episodes: int) -> Iterator[None]:
    """Reserves the files of some episodes for the block; waits until they are free. A request above
    the limit is granted when no other episode is open."""
    global _open
    most = max_open_episodes()
    with _changed:
        _changed.wait_for(lambda: not _open or _open + episodes <= most)
        _open += episodes
    try:
        yield
    finally:
        with _changed:
            _open -= episodes
            _changed.notify_all()
