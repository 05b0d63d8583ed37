"""Mathematical equality of expressions, checked in processes that can be killed.

A completion may contain a number that takes hours to compute. In the learner's process that would
block every thread, because an operation on integers holds the interpreter until it is done.
"""

import atexit
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from jaxrl.environments.isolation.calls import hold_processor

_CHILD = Path(__file__).with_name("mathematics_child.py")
_SECONDS = 5.0  # of CPU time for a comparison
_MEMORY = 4 << 30  # bytes

_idle: list[subprocess.Popen[str]] = []


def equal(reference: str, completion: str) -> bool:
    """Returns True if the expression in a completion equals the one in the reference answer; False
    if comparing them takes more than 5 seconds of CPU time or 4 GiB. Raises as
    `builtin.math_verify`, and RuntimeError if the package fails."""
    with hold_processor():
        equal = _ask(json.dumps([reference, completion]))
    if equal is None:
        raise ValueError(f"math_verify: the reference answer {reference!r} contains no expression")
    if isinstance(equal, str):
        raise RuntimeError(f"math_verify: {equal}")
    return equal


def _ask(question: str) -> bool | str | None:
    """Sends a question to an idle process; returns False if it kills the process."""
    try:
        process = _idle.pop()
    except IndexError:
        process = _start()
    try:
        print(question, file=process.stdin, flush=True)
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
        start_new_session=True,  # Ctrl-C must reach only the learner, which finishes its step
    )
    loaded = _line(process).strip()
    if loaded != "true":
        _end(process)
        raise RuntimeError(f"importing math-verify failed: {loaded}")
    return process


def _end(process: subprocess.Popen[str]) -> None:
    with process:  # closes its streams and waits for it
        process.kill()


@atexit.register
def _end_all() -> None:
    while _idle:
        _end(_idle.pop())
