"""Room for episodes: each keeps an event loop open, and a process may open so many files."""

import contextlib
import resource
import threading
from collections.abc import Iterator

_FILES = 3  # that an event loop keeps open
_ENOUGH = 1 << 16  # files; some programs look at each number that is allowed

_changed = threading.Condition()
_taken = 0


def episodes_at_once() -> int:
    """How many episodes may be open, all together: half of the files that the process may open are
    for them. Raises the process's soft limit as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    else:
        most = _ENOUGH if soft == resource.RLIM_INFINITY else soft
    return max(1, most // 2 // _FILES)


@contextlib.contextmanager
def room(episodes: int) -> Iterator[None]:
    """Waits until there is room for so many episodes, and holds it for the block. More than there
    can ever be get it once they are alone."""
    global _taken
    most = episodes_at_once()
    with _changed:
        _changed.wait_for(lambda: not _taken or _taken + episodes <= most)
        _taken += episodes
    try:
        yield
    finally:
        with _changed:
            _taken -= episodes
            _changed.notify_all()
