"""A sandbox for untrusted Python: a process without network, other processes or the user's files.

Linux only. Kernel namespaces hide the network, other processes, devices and all files but the
system's and Python's own; only an empty directory in memory can be written to. A system-call filter
blocks the sockets of other programs. Limits bound time, memory and output. The program can neither
see nor signal this process, which watches it, and ends with it. The sandbox is as safe as the
kernel: do not run code written to break out of it.
"""

import contextlib
import dataclasses
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from jaxrl.environments.isolation import walls
from jaxrl.environments.isolation.calls import hold_processor

_STARTUP_SECONDS = 30.0  # for a process to start and to set up its walls
_CHUNK = 1 << 16
_CANNOT = (
    "the sandbox cannot be set up: {}; it needs Linux on x86-64 or aarch64 with user namespaces "
    "(in a container: a seccomp profile that allows unshare and mount)"
)


class SandboxError(RuntimeError):
    """The machine cannot run the sandbox."""


class UnsupportedTestsError(ValueError):
    """The tests need something that cannot cross to another process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of a program."""

    seconds: float = 5.0  # of wall-clock time
    memory: int = 512 << 20  # bytes of address space of each process, and of files
    processes: int = 16  # at once; Linux does not apply this limit to root
    output: int = 64 << 10  # bytes kept of each of the two streams


@dataclasses.dataclass(frozen=True)
class ProgramResult:
    """The outcome of a program."""

    status: int  # exit status; 128 + N after signal N
    stdout: str  # truncated at `SandboxLimits.output`
    stderr: str
    timed_out: bool  # it was killed at the time limit


def run_python(code: str, *, limits: SandboxLimits | None = None) -> ProgramResult:
    """Runs a Python program that needs only the standard library, as `__main__`; raises
    SandboxError if the sandbox cannot be set up. It starts once a processor is free."""
    limits = limits or SandboxLimits()
    with hold_processor(), _host("program", code, limits=limits) as host:
        until = _wait_until_ready([host], limits)
        in_time = _watch([host], until=until)
        status = host.end()
    return ProgramResult(status, host.text("stdout"), host.text("stderr"), not in_time)


def run_tests(code: str, tests: str, *, limits: SandboxLimits | None = None) -> bool:
    """Runs tests in one interpreter against a module of code in another.

    The tests use the names of the code as if they had imported them; `inside/peer.py` describes the
    values that cross between the processes. The code never holds the tests, their expected values
    or the proof that they passed.

    Returns:
      True if the tests ran to their end in time.

    Raises:
      SandboxError: if the sandbox cannot be set up on this machine.
      UnsupportedTestsError: if the tests pass something to the code that cannot cross, such as a
        module.
    """
    limits = limits or SandboxLimits()
    with contextlib.ExitStack() as stack:
        stack.enter_context(hold_processor())
        asked, asks = _pipe(stack)
        answers, answered = _pipe(stack)
        served = stack.enter_context(_host("code", code, limits=limits, pipes=(asked, answered)))
        tester = stack.enter_context(_host("tests", tests, limits=limits, pipes=(answers, asks)))
        for end in (asked, asks, answers, answered):
            end.close()  # so that each side sees the other one's end
        until = _wait_until_ready([served, tester], limits)
        # The tests end at once when the code's process does, so it suffices to wait for the tests.
        _watch([tester, served], until=until)
        report = tester.outputs["control"].decode(errors="replace")
    if report.startswith("U"):
        raise UnsupportedTestsError(f"the tests cannot run apart from the code: {report[1:]}")
    return report == "P"


class _Host:
    """A process behind walls, its streams and its control pipe."""

    def __init__(self, process: "subprocess.Popen[bytes]", control: int, most: int) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.process = process
        self.streams = {
            "control": control,
            "stdout": process.stdout.fileno(),
            "stderr": process.stderr.fileno(),
        }
        self.outputs = {name: bytearray() for name in self.streams}
        self._most = most
        # A selector can wait for it, and it names this process even if the number is reused.
        self.exited = os.pidfd_open(process.pid)

    def read(self, name: str) -> bool:
        """Reads once from a stream, and keeps at most `limits.output` bytes; False at its end."""
        data = os.read(self.streams[name], _CHUNK)
        kept = self.outputs[name]
        # The rest is read as well: a full pipe would stop the program, which would then time out.
        kept += data[: self._most - len(kept)]
        return bool(data)

    def end(self) -> int:
        """Kills the process, if it runs, and returns its status."""
        # It is the process outside the walls. PID 1 inside ends with it, and the kernel then ends
        # all other processes of the namespace.
        self.process.kill()
        status = self.process.wait()
        return status if status >= 0 else 128 - status

    def text(self, name: str) -> str:
        """Returns the text read from a stream."""
        return self.outputs[name].decode(errors="replace")


@contextlib.contextmanager
def _host(
    role: str, source: str, *, limits: SandboxLimits, pipes: Sequence[BinaryIO] = ()
) -> Iterator[_Host]:
    """Starts a process; it is gone after the block."""
    if sys.platform != "linux":
        raise SandboxError(_CANNOT.format(f"this is {sys.platform}"))
    # Lone surrogates cannot be encoded, and no valid program has them.
    text = walls.memory_file(source.encode(errors="replace"))
    # Standard output belongs to the program, which could forge a report there.
    control, its_end = os.pipe()
    # The source is a descriptor: the length of arguments is limited, and files are not visible.
    keep = (its_end, text, *(pipe.fileno() for pipe in pipes))
    seconds = int(limits.seconds) + 1  # of computing
    arguments = (seconds, limits.memory, limits.processes, *keep)
    try:
        process = walls.start(role, arguments, memory=limits.memory, keep=keep)
    except OSError as error:
        os.close(control)
        raise SandboxError(_CANNOT.format(error)) from None
    finally:
        os.close(its_end)
        os.close(text)
    with process:
        host = _Host(process, control, limits.output)
        try:
            yield host
        finally:
            host.end()
            os.close(host.exited)
            os.close(control)


def _wait_until_ready(hosts: Sequence[_Host], limits: SandboxLimits) -> float:
    """Waits until all processes are set up, and returns the deadline of their program."""
    latest = time.monotonic() + _STARTUP_SECONDS
    for host in hosts:
        with selectors.DefaultSelector() as selector:
            selector.register(host.streams["control"], selectors.EVENT_READ)
            in_time = selector.select(max(0.0, latest - time.monotonic()))
        if not in_time:
            raise SandboxError(
                f"the sandbox did not start within {_STARTUP_SECONDS:g} s; reduce the load on the "
                "machine"
            )
        # Nothing is read at the end of the stream: the process ended before it was ready.
        if os.read(host.streams["control"], 1) != b"1":
            host.process.wait(_STARTUP_SECONDS)
            lines = os.read(host.streams["stderr"], _CHUNK).decode(errors="replace").splitlines()
            last = lines[-1] if lines else f"status {host.process.returncode}"
            raise SandboxError(_CANNOT.format(last))
    # The clock starts only now: a slow start is the machine's fault, not the program's.
    return time.monotonic() + limits.seconds


def _watch(hosts: Sequence[_Host], *, until: float) -> bool:
    """Reads all streams until the first process has exited and its streams are closed; returns
    False if the deadline comes first."""
    with selectors.DefaultSelector() as selector:
        for host in hosts:
            for name, stream in host.streams.items():
                selector.register(stream, selectors.EVENT_READ, (host, name))
        selector.register(hosts[0].exited, selectors.EVENT_READ, (hosts[0], None))
        # Exit and streams: afterwards a pipe may still hold output, and a child process may still
        # write to it. Other hosts are read so that they do not block.
        left = 1 + len(hosts[0].streams)
        while left:
            wait = until - time.monotonic()
            if wait <= 0:
                return False
            for key, _ in selector.select(wait):
                host, name = key.data
                if name is None or not host.read(name):
                    selector.unregister(key.fileobj)
                    left -= host is hosts[0]
    return True


def _pipe(stack: contextlib.ExitStack) -> tuple[BinaryIO, BinaryIO]:
    """Returns the two ends of a pipe, which the stack closes."""
    reads, writes = os.pipe()
    return stack.enter_context(open(reads, "rb", 0)), stack.enter_context(open(writes, "wb", 0))
