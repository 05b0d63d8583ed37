"""A full disk: one message in place of what the threads that write checkpoints say about it."""

import errno
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
_TEXTS = tuple(map(os.strerror, _NUMBERS))  # tensorstore's errors have no number, but quote these
# Of tensorstore's threads, when a write ends after orbax has given up waiting for it.
_LATE = "Event loop is closed"


@contextmanager
def one_message(directory: str) -> Iterator[None]:
    """Names the directory of a run whose disk is full; JAXRL_TRACEBACK=1 keeps what libraries say.

    Raises:
      OSError: in place of any error that a full disk caused.
    """
    if not os.environ.get("JAXRL_TRACEBACK"):
        for name in ("absl", "asyncio"):  # orbax logs with them, also after the run has ended
            logging.getLogger(name).addFilter(_tells_news)
        sys.unraisablehook = _quietened(sys.unraisablehook)
        threading.excepthook = _quietened(threading.excepthook)
    try:
        yield
    except Exception as error:
        if not _is_full(error):
            raise
        advice = "the disk is full; make room, then rerun the same command, which resumes"
        raise OSError(errno.ENOSPC, advice, directory) from error


def _tells_news(record: logging.LogRecord) -> bool:
    return not (record.exc_info and _is_known(record.exc_info[1]))  # asyncio's may be False


def _quietened(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a hook for errors that nobody catches, without those that say nothing new."""
    if getattr(hook, "func", None) is _print_news:
        return hook
    return functools.partial(_print_news, hook)


def _print_news(hook: Callable[[Any], Any], found: Any) -> None:
    if not _is_known(found.exc_value):
        hook(found)


def _is_known(error: BaseException | None) -> bool:
    return _is_full(error) or (isinstance(error, RuntimeError) and str(error) == _LATE)


def _is_full(error: BaseException | None) -> bool:
    """Tells whether an error, or what led to it, is that of a full disk."""
    while error is not None:
        if getattr(error, "errno", None) in _NUMBERS or any(t in str(error) for t in _TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False
