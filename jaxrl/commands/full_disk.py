"""A full disk: one message in place of what the threads that write checkpoints say about it."""

import errno
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
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
        for module in (sys, threading):
            _quieten(module)
    try:
        yield
    except Exception as error:
        if not _is_full(error):
            raise
        advice = "the disk is full; make room, then rerun the same command, which resumes"
        raise OSError(errno.ENOSPC, advice, directory) from error


def _tells_news(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not _is_known(record.exc_info[1])


def _quieten(module: ModuleType) -> None:
    """Keeps what says nothing new from a module's hook for errors that nobody catches."""
    hook = module.excepthook
    if getattr(hook, "func", None) is not _print_news:
        module.excepthook = functools.partial(_print_news, hook)


def _print_news(hook: Callable[..., None], *args: Any) -> None:
    error = args[1] if len(args) == 3 else args[0].exc_value  # of sys, and of threading
    if not _is_known(error):
        hook(*args)


def _is_known(error: BaseException | None) -> bool:
    return _is_full(error) or (isinstance(error, RuntimeError) and str(error) == _LATE)


def _is_full(error: BaseException | None) -> bool:
    """Tells whether an error, or what led to it, is that of a full disk."""
    while error is not None:
        if getattr(error, "errno", None) in _NUMBERS or any(t in str(error) for t in _TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False
