"""A full disk: one message in place of what the threads that write checkpoints log about it."""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
_TEXTS = tuple(map(os.strerror, _NUMBERS))  # tensorstore's errors have no number, but quote these


@contextmanager
def one_message(directory: str) -> Iterator[None]:
    """Names the directory of a run whose disk is full; JAXRL_TRACEBACK=1 keeps the libraries' logs.

    Raises:
      OSError: in place of any error that a full disk caused.
    """
    if not os.environ.get("JAXRL_TRACEBACK"):
        for name in ("absl", "asyncio"):  # orbax logs with them, also after the run has ended
            logging.getLogger(name).addFilter(_tells_news)
    try:
        yield
    except Exception as error:
        if not _is_full(error):
            raise
        advice = "the disk is full; make room, then rerun the same command, which resumes"
        raise OSError(errno.ENOSPC, advice, directory) from error


def _tells_news(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not _is_full(record.exc_info[1])


def _is_full(error: BaseException | None) -> bool:
    """Tells whether an error, or what led to it, is that of a full disk."""
    while error is not None:
        if getattr(error, "errno", None) in _NUMBERS or any(t in str(error) for t in _TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False
