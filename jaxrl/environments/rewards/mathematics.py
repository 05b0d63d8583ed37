"""Comparison of mathematical expressions, in child processes that can be killed.

A completion may contain a number that takes hours to compute. In the learner's own process that
would stop every thread: one operation on integers holds the interpreter until it is done.
"""

import atexit
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from jaxrl.environments.isolation.calls import hold_processor

_CHILD = Path(__file__).with_name("mathematics_child.py")
_SECONDS = 5.0  # of processor time per comparison; waiting for a processor does not count
_MEMORY = 4 << 30

_idle: list[subprocess.Popen[str]] = []


def equal(reference: str, completion: str) -> bool:
    """Compares the expressions in a completion and in the reference answer. Returns False if the
    comparison takes more than 5 seconds of processor time or 4 GiB of memory.

    Raises:
      ValueError: if the reference answer contains no expression.
      ModuleNotFoundError: if the package math-verify is not installed.
      RuntimeError: if the package fails.
    """
    with hold_processor():
        found = _asked(json.dumps([reference, completion]))
    if found is None:
        raise ValueError(f"math_verify: the reference answer {reference!r} contains no expression")
    if isinstance(found, str):
        raise RuntimeError(f"math_verify: {found}")
    return found


def _asked(question: str) -> bool | str | None:
    """Sends a question to a child process and returns its reply; False if the process died."""
    try:
        process = _idle.pop()
    except IndexError:
        process = _start()
    try:
        assert process.stdin is not None
        process.stdin.write(question + "\n")
        process.stdin.flush()
        line = _line(process)
    except BaseException:
        _end(process)
        raise
    if not line:
        _end(process)
        return False
    _idle.append(process)
    return json.loads(line)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _start() -> subprocess.Popen[str]:
    if importlib.util.find_spec("math_verify") is None:
        raise ModuleNotFoundError(
            "the reward math_verify needs the package math-verify: pip install math-verify"
        )
    process = subprocess.Popen(
        [sys.executable, "-P", str(_CHILD), str(_SECONDS), str(_MEMORY)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C is for the learner, which finishes its step
    )
    said = _line(process).strip()
    if said != "true":
        _end(process)
        raise RuntimeError(f"math-verify cannot be loaded: {said}")
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()
    process.wait()


@atexit.register
def _end_all() -> None:
    while _idle:
        _end(_idle.pop())
