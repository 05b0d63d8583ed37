"""Runs Python that nobody has read, in a process of its own that can reach nothing.

Linux only. The kernel's namespaces keep it from the network, from other processes, from devices and
from writing to any file outside of an empty directory in memory, and a filter of system calls from
the sockets of other programs; limits end it when it takes too much time, memory or output. It can
read what the user can read, and nothing of that leaves it but its output, and what it writes to
named pipes that the user may write to. This is as safe as the kernel: do not run what is written to
break out of it.
"""

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl.environments.isolation.calls import processor

_CHILD = Path(__file__).with_name("sandbox_child.py")
_STARTING = 30.0  # seconds that a process has to start and to set up its walls


class SandboxError(RuntimeError):
    """The machine does not offer what the sandbox is made of."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may take.

    Attributes:
      seconds: of wall-clock time.
      memory: bytes of address space of a process, and of files.
      processes: that exist at a time; Linux does not hold root to it.
      output: bytes of each of the two streams that are kept.
    """

    seconds: float = 5.0
    memory: int = 512 << 20
    processes: int = 16
    output: int = 64 << 10


@dataclasses.dataclass(frozen=True)
class Ran:
    """How a program ended.

    Attributes:
      status: exit status; negative is a signal.
      stdout, stderr: what it printed, cut off at `Limits.output`.
      timed_out: whether it was ended because it took too long.
    """

    status: int
    stdout: str
    stderr: str
    timed_out: bool


def run_python(code: str, *, then: Sequence[str] = (), limits: Limits | None = None) -> Ran:
    """Runs a program, once one of the machine's processors is free of other programs.

    Args:
      code: Python, without packages but the standard library. It is `__main__`, or a module with
        another name if something is to be run then.
      then: more Python, one after the other with what was defined before, unless that raised. Each
        comes into the process when all before have been run.
      limits: what it may take.

    Raises:
      SandboxError: if the walls cannot be set up here.
    """
    limits = limits or Limits()
    numbers = (limits.seconds, limits.memory, limits.processes, limits.output)
    parts = [part.encode() for part in (code, *then)]
    command = [sys.executable, "-I", "-S", str(_CHILD), *map(str, numbers)]
    try:
        with processor():
            done = subprocess.run(
                command,
                input=b"".join(
                    b"%d %d\n%s" % (len(parts) - 1 - i, len(part), part)
                    for i, part in enumerate(parts)
                ),
                capture_output=True,
                env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
                timeout=limits.seconds + _STARTING,
                check=False,
                start_new_session=True,  # whoever has a terminal can type into its user's shell
            )
    except subprocess.TimeoutExpired as late:
        raise SandboxError(
            f"no sandbox after {late.timeout:g} s: the machine is overloaded"
        ) from None
    printed, _, last = _text(done.stderr).rstrip("\n").rpartition("\n")
    if done.returncode:
        raise SandboxError(
            f"the sandbox cannot be set up here: {last}; it needs Linux on "
            "x86-64 or aarch64 with user namespaces (in a container: a seccomp profile that allows "
            "unshare and mount)"
        )
    status, in_time = map(int, last.split())
    return Ran(status, _text(done.stdout), printed, not in_time)


def _text(data: bytes | None) -> str:
    return (data or b"").decode(errors="replace")
