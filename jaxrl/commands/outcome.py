"""Runs of the commands that train, and the last lines that they print."""

import errno
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from jaxrl.config.bucket import local_directory
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.config.toml_file import flatten
from jaxrl.config.training import Config
from jaxrl.core import Hosts
from jaxrl.training import cluster

if TYPE_CHECKING:
    import jaxrl.train
    from jaxrl.training.supervised import fit

C = TypeVar("C", bound=Config | SupervisedConfig)
R = TypeVar("R", bound="jaxrl.train.Result | fit.FitResult")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LATE = "Event loop is closed"  # if a write ends after orbax stopped waiting


def run(config: C, train: Callable[[C], R], conclude: Callable[[R], tuple[str, int]]) -> int:
    """Trains in this process or, with [hosts], in all processes of a run; returns the exit status.

    Process 0 prints the outcome. Unless a signal ended the run, `conclude` returns its text and the
    status.
    """
    joined = cluster.joined(config.hosts, same=flatten(config))
    with _full_disk_as_one_message(config.run_dir), joined:
        result, leads = train(config), Hosts().leads
    if (signum := result.signum) is not None:
        again = "rerun the same command to resume"
        text, status = f"ended by signal {signum} at step {result.step}; {again}", 128 + signum
    else:
        text, status = conclude(result)
    if leads:  # of a run in a bucket, not where it is mirrored
        print(text.replace(str(local_directory(config.run_dir)), config.run_dir))
    return status


def last_loss(result: "fit.FitResult") -> tuple[str, int]:
    """Concludes a run on texts."""
    found = result.last.get("loss", float("nan"))
    return f"loss {found:.4f} nats per token; {_model(result)}", 0


def held_out_accuracy(result: "fit.FitResult") -> tuple[str, int]:
    """Concludes a run on preference pairs, by its last loss if no pairs were held out."""
    before, after = result.first.get("accuracy"), result.last.get("eval/accuracy")
    text = f"loss {result.last.get('loss', float('nan')):.4f}"
    if before is not None and after is not None:
        text = f"held-out pairs ranked correctly: {change(before, after)}"
    return f"{text}; {_model(result)}", 0


def _model(result: "fit.FitResult") -> str:
    return f"model: {result.model} ({result.written})"


def change(before: float, after: float, *, failed: tuple[int, int] = (0, 0), of: int = 0) -> str:
    """Formats two shares as "27.5 % (9 of 40 could not be scored) -> 98.0 %"."""
    shares = (
        f"{share:.1%}".replace("%", " %") + f" ({count} of {of} could not be scored)" * (count > 0)
        for share, count in zip((before, after), failed, strict=True)
    )
    return " -> ".join(shares)


@contextmanager
def _full_disk_as_one_message(directory: str) -> Iterator[None]:
    """Turns errors of a full disk into one OSError that names the directory, and hides messages of
    library threads about it unless JAXRL_TRACEBACK is set."""
    if not os.environ.get("JAXRL_TRACEBACK"):
        for name in ("absl", "asyncio"):  # orbax logs with them, also after the run has ended
            logging.getLogger(name).addFilter(_is_news)
        sys.unraisablehook = _quieted(sys.unraisablehook)
        threading.excepthook = _quieted(threading.excepthook)
    try:
        yield
    except Exception as error:
        if not _is_full(error):
            raise
        advice = "the disk is full; make room, then rerun the same command, which resumes"
        raise OSError(errno.ENOSPC, advice, directory) from error


def _is_news(record: logging.LogRecord) -> bool:
    return not (record.exc_info and _is_full(record.exc_info[1]))  # asyncio's may be False


def _quieted(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(found: Any) -> None:
        if not (_is_full(found.exc_value) or str(found.exc_value) == _LATE):
            hook(found)

    return call


def _is_full(error: BaseException | None) -> bool:
    """Tells if a full disk caused an error."""
    if error is None:
        return False
    # tensorstore's errors have no number, but quote the text.
    quoted = any(os.strerror(number) in str(error) for number in _FULL)
    known = quoted or getattr(error, "errno", None) in _FULL
    return known or _is_full(error.__cause__ or error.__context__)
