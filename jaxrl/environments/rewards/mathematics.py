"""Whether two expressions are equal as mathematics, found out in processes that can be ended.

An answer may hold a number whose computation takes hours. In the learner's own process that would
stop every thread: an operation on whole numbers holds the interpreter until it is done.
"""

import atexit
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from jaxrl.environments.isolation.calls import hold_processor

_CHILD = Path(__file__).with_name("mathematics_child.py")
_SECONDS = 5.0  # that may be computed for a comparison; waiting for a processor does not count
_MEMORY = 4 << 30

_idle: list[subprocess.Popen[str]] = []


def equal(reference: str, completion: str) -> bool:
    """Whether the expression in a completion equals the one in the reference answer. Where that
    would take more than 5 seconds of computing, or 4 GiB, it does not.

    Raises:
      ValueError: if the reference answer holds no expression.
      ModuleNotFoundError: without the package math-verify.
      RuntimeError: if the package fails.
    """
    with hold_processor():
        found = _asked(json.dumps([reference, completion]))
    if found is None:
        raise ValueError(f"math_verify: the reference answer {reference!r} holds no expression")
    if isinstance(found, str):
        raise RuntimeError(f"math_verify: {found}")
    return found


def _asked(question: str) -> bool | str | None:
    """What a process answers. One that comes to its end instead gets no other question."""
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
