"""A sandbox for untrusted Python: a process without network, files to write or other processes.

Linux only. Kernel namespaces hide the network, other processes and devices; every file system is
read-only except an empty directory in memory. A system-call filter blocks the sockets of other
programs. Limits bound time, memory and output. The program can read what its user can read, but its
only outputs are its two streams and named pipes that the user may write to. This is as safe as the
kernel: do not run code written to break out of it.
"""

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl.environments.isolation.calls import hold_processor

_CHILD = Path(__file__).with_name("sandbox_child.py")
_STARTUP_SECONDS = 30.0  # for a process to start and to set up its namespaces


class SandboxError(RuntimeError):
    """The machine cannot run the sandbox."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of a program, in the order of the child's arguments."""

    seconds: float = 5.0  # of wall-clock time
    memory: int = 512 << 20  # bytes of address space of each process, and of files
    processes: int = 16  # at once; Linux does not apply this limit to root
    output: int = 64 << 10  # bytes kept of each of the two streams


@dataclasses.dataclass(frozen=True)
class ProgramResult:
    """The outcome of a program."""

    status: int  # exit status; negative for a signal
    stdout: str  # truncated at `SandboxLimits.output`
    stderr: str
    timed_out: bool  # it was killed at the time limit


def run_python(
    code: str, *, then: Sequence[str] = (), limits: SandboxLimits | None = None
) -> ProgramResult:
    """Runs Python that needs only the standard library, once a processor is free of other programs.

    It runs as `__main__`; if `then` follows, as a module of another name, and the parts of `then`
    after it in the same module until one raises. A part enters the process only after the parts
    before it have run.

    Raises:
      SandboxError: if the sandbox cannot be set up on this machine.
    """
    limits = limits or SandboxLimits()
    command = [sys.executable, "-I", "-S", str(_CHILD), *map(str, dataclasses.astuple(limits))]
    parts = [part.encode() for part in (code, *then)]
    headed = (b"%d %d\n%s" % (len(parts) - i, len(p), p) for i, p in enumerate(parts, start=1))
    try:
        with hold_processor():
            done = subprocess.run(
                command,
                input=b"".join(headed),
                capture_output=True,
                env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
                timeout=limits.seconds + _STARTUP_SECONDS,
                check=False,
                start_new_session=True,  # with a terminal it could type into the user's shell
            )
    except subprocess.TimeoutExpired as late:
        raise SandboxError(
            f"the sandbox did not start within {late.timeout:g} s; reduce the load on the machine"
        ) from None
    stderr, _, last = _text(done.stderr).rstrip("\n").rpartition("\n")
    if done.returncode:
        raise SandboxError(
            f"the sandbox cannot be set up: {last}; it needs Linux on x86-64 or aarch64 with user "
            "namespaces (in a container: a seccomp profile that allows unshare and mount)"
        )
    status, in_time = map(int, last.split())
    return ProgramResult(status, _text(done.stdout), stderr, not in_time)


def _text(data: bytes | None) -> str:
    return (data or b"").decode(errors="replace")
