"""Attempts to escape the sandbox, to outlive its limits and to reach its watcher."""

import contextlib
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from jaxrl.environments.isolation import sandbox, walls
from jaxrl.environments.isolation.inside import own_walls
from jaxrl.environments.isolation.inside.system_calls import SYSTEM_CALLS, filter_program
from jaxrl.environments.isolation.sandbox import SandboxLimits, run_python

pytestmark = pytest.mark.usefixtures("each_wall", "unhurried")


@pytest.fixture
def from_first_line(monkeypatch):
    """Counts a program's time from its first line on, which comes late on a busy machine."""
    begun, read = list[float](), sandbox._Host.read

    def noting(host, name):
        more = read(host, name)
        if not begun and host.outputs["stdout"]:
            begun.append(time.monotonic())
        return more

    def monotonic():
        return time.monotonic() - begun[0] if begun else 0.0

    monkeypatch.setattr(sandbox._Host, "read", noting)
    monkeypatch.setattr(sandbox, "time", SimpleNamespace(monotonic=monotonic))


def test_status_and_streams_are_returned():
    ran = run_python("import sys\nprint(repr(sys.stdin.read()))\nsys.exit(97)")
    assert (ran.status, ran.stdout, ran.stderr, ran.timed_out) == (97, "''\n", "", False)


def test_traceback_shows_program_lines_only():
    ran = run_python("def f():\n    return 1 / 0\n\nf()")
    assert ran.status == 1
    assert ran.stderr.count("File ") == 2
    assert ran.stderr.endswith("ZeroDivisionError: division by zero\n")


ESCAPES = {
    "network": "import socket; socket.create_connection(('127.0.0.1', 22), timeout=1)",
    "names": "import socket; socket.getaddrinfo('example.org', 80)",
    "writing": "open('{there}/new', 'w')",
    "reading the user's files": "print(open('{there}/kept').read())",
    "reading this repository": "print(open({here!r}).read())",
    "the sandbox's place on the machine": "print(open({walls!r}).read())",
    "the user's named pipes": "open('{there}/pipe', 'w')",
    "another root": "import os; os.chroot('/tmp')",
    "the old root": "import ctypes; assert ctypes.CDLL(None).umount2(b'/', 2) == 0",
    "tracing": "import ctypes; assert ctypes.CDLL(None).ptrace(16, {pid}, 0, 0) == 0",
    "another process's memory": "import os; os.pidfd_open({pid})",
    "deleting": "import os; os.remove('{there}/kept')",
    "shared memory": "open('/dev/shm/new', 'w')",
    "the terminal": "open('/dev/tty')",
    "a service of the machine": "import socket; socket.socket(socket.AF_UNIX)",
    "a service by messages": "import socket\n"
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'', '/dev/log')",
    "the hypervisor": "import socket; socket.socket(40, socket.SOCK_STREAM)",
    "devices": "open('/dev/full', 'w')",
    "other processes": "open('/proc/{pid}/cmdline')",
    "the kernel": "open('/proc/sys/kernel/core_pattern', 'w')",
    "killing": "import os, signal; os.kill({pid}, signal.SIGKILL)",
    "killing all": "import os, signal; os.kill(-1, signal.SIGKILL)",
    "writable again": "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\n"
    "assert libc.mount(None, b'/', None, 4096 | 32, None) == 0, os.strerror(ctypes.get_errno())",
    "new namespaces": "import ctypes; assert ctypes.CDLL(None).unshare(1 << 28 | 1 << 17) == 0",
    "a child's namespaces": "import ctypes; assert ctypes.CDLL(None).syscall({clone}, "
    "1 << 28 | 17, 0, 0, 0, 0) >= 0",
    "outliving": "import ctypes; assert ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0",
    "keyrings": "import ctypes; assert ctypes.CDLL(None).syscall({keyctl}, 0, -3, 1) >= 0",
    "another user": "import os; os.setuid(0)",
    "memory": "x = bytearray(1 << 30)",
    "memory in files": "import os; os.memfd_create('x')",
    "memory that is shared": "import ctypes; assert ctypes.CDLL(None).shmget(0, 99, 0o1600) >= 0",
    "files": "f = open('big', 'wb')\nfor _ in range(1000): f.write(bytes(1 << 20))\nf.flush()",
}


@pytest.mark.parametrize("way", ESCAPES)
def test_no_escape_succeeds(tmp_path, way):
    (tmp_path / "kept").write_text("")
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        calls = SYSTEM_CALLS[os.uname().machine]
        names = {"clone": calls["clone"], "keyctl": calls["denied"][5]}
        names |= {"here": __file__, "walls": own_walls.__file__}
        code = ESCAPES[way].format(there=tmp_path, pid=other.pid, **names)
        ran = run_python(code, limits=SandboxLimits(seconds=250.0, memory=256 << 20))
        assert ran.status != 0, ran
        assert ran.stderr, ran
        assert not ran.timed_out
        assert other.poll() is None
        other.kill()
    assert sorted(os.listdir(tmp_path)) == ["kept", "pipe"]
    assert not os.path.exists("/dev/shm/new")


def test_ordinary_programs_work():
    code = """
import asyncio, os, subprocess, threading
open("/dev/null", "w").write("x")
assert len(open("/dev/urandom", "rb").read(4)) == len(open("/dev/zero", "rb").read(4)) == 4
assert open("/dev/stdin").read() == ""
assert sorted(int(p) for p in os.listdir("/proc") if p.isdigit()) == [1]
assert asyncio.run(asyncio.sleep(0, "slept")) == "slept"
thread = threading.Thread(target=open, args=("made", "w"))
thread.start()
thread.join()
print(subprocess.run(["ls"], capture_output=True, text=True).stdout, os.getcwd())
"""
    ran = run_python(code)
    assert (ran.stdout, ran.stderr) == ("made\n /tmp\n", "")


def test_masked_proc_becomes_empty():
    """As in a container, where the kernel refuses to mount another."""
    inside = """
from jaxrl.environments.isolation.sandbox import run_python
print(run_python("import os; print(os.listdir('/proc'))").stdout)
"""
    hide = 'mount --bind /dev/null /proc/uptime && exec "$0" -c "$1"'
    apart = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", hide]
    command = [*apart, sys.executable, inside]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n\n"


@pytest.mark.parametrize("machine", SYSTEM_CALLS)
def test_filter_denies_exactly_listed_calls(machine):
    """Interprets the filter, so that it covers other processors too."""
    calls = SYSTEM_CALLS[machine]

    def errno(call, first=0, second=0, architecture=calls["architecture"]):
        data = {0: call, 4: architecture, 16: first, 24: second}
        at, held = 0, 0
        while True:
            kind, so, not_so, number = filter_program(machine)[at]
            match kind:
                case 0x06:
                    return 0 if number == 0x7FFF0000 else number - 0x50000
                case 0x20:
                    held = data[number]
                case 0x54:
                    held &= number
                case _:
                    true = {0x15: held == number, 0x35: held >= number, 0x45: held & number}[kind]
                    at += so if true else not_so
            at += 1

    denied = {*calls["denied"], 425, 447}
    for call in range(600):
        expected = 1 if call in denied | {calls["socket"], calls["socketpair"]} else 0
        assert errno(call) == (38 if call == 435 else expected)
        assert errno(call | 1 << 30) == errno(call, architecture=0x40000003) == 1
    clone, socket, pair = (calls[name] for name in ("clone", "socket", "socketpair"))
    assert (errno(clone, 17), errno(clone, 1 << 28 | 17)) == (0, 1)
    assert [errno(calls["prctl"], what) for what in (1, 15)] == [1, 0]
    assert [errno(socket, family) for family in (1, 2, 10, 16, 40)] == [1, 0, 0, 1, 1]
    assert [errno(pair, 1, kind) for kind in (1, 1 | 0o2004000, 2, 3, 5)] == [0, 0, 1, 1, 1]


def test_terminal_is_not_inherited():
    """With a terminal it could type into the user's shell (TIOCSTI)."""
    ours, theirs = os.openpty()
    line = "open('/proc/self/stat').read().rpartition(')')[2].split()[4]"  # 0 is none
    code = f"""
import fcntl, termios
from jaxrl.environments.isolation.sandbox import run_python
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
print({line}, run_python("print({line})").stdout)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=theirs,
        capture_output=True,
        text=True,
        start_new_session=True,
        check=True,
    )
    os.close(ours)
    os.close(theirs)
    of_user, of_program = done.stdout.split()
    assert of_user != "0"
    assert of_program == "0"


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(600)",
        "import os, time\nos.fork()\nos.setsid() if os.getpid() != 1 else None\ntime.sleep(600)",
        "import os\nfor _ in range(6): os.fork()\nwhile True: pass",
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)",
        "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(600)",
    ],
)
def test_timeout_kills_program_and_children(from_first_line, code):
    start = time.monotonic()
    ran = run_python("print('begun', flush=True)\n" + code, limits=SandboxLimits(seconds=1.0))
    assert ran.timed_out
    assert ran.stdout == "begun\n"
    assert time.monotonic() - start < 250


def test_output_is_truncated_at_the_limit(from_first_line):
    ran = run_python("while True: print('x' * 999)", limits=SandboxLimits(seconds=1.0, output=5000))
    assert len(ran.stdout) == 5000


STOPS = {
    "kills its group": "os.kill(0, signal.SIGKILL)",
    "stops its group": "os.kill(0, signal.SIGSTOP)",
    "stops itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "stops everyone": "os.kill(-1, signal.SIGSTOP)",
    "stops its threads": "signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)",
    "stops its parent": "os.kill(os.getppid(), signal.SIGSTOP)",
    "a child kills its group": "os.fork() or os.kill(0, signal.SIGKILL)",
    "a child in its session stops it": "os.fork() or os.kill(1, signal.SIGSTOP)",
    "asks for signals to the group": "fcntl.fcntl(1, fcntl.F_SETOWN, 0)",
    "lowers its watcher": "os.setpriority(os.PRIO_PGRP, 0, 19)",
}


@pytest.mark.parametrize("way", STOPS)
def test_a_program_cannot_reach_its_watcher(way):
    """The result is one of a program that ran too long, never an error and never late."""
    code = f"""
import fcntl, os, signal, threading, time
try: {STOPS[way]}
except OSError: pass
print("still here", flush=True)
time.sleep(600)
"""
    start = time.monotonic()
    ran = run_python(code, limits=SandboxLimits(seconds=0.5))
    assert ran.timed_out
    assert ran.status == 128 + 9
    assert time.monotonic() - start < 250


def test_a_program_ends_with_its_killed_learner():
    memory = (512 << 20) + os.getpid()  # marks its processes
    code = f"""
import sys
from jaxrl.environments.isolation import walls
from jaxrl.environments.isolation.sandbox import SandboxLimits, run_python
if sys.argv[1] == "False": walls.find_bubblewrap = lambda: None
limits = SandboxLimits(seconds=600, memory={memory})
run_python("import os, time\\nos.fork()\\ntime.sleep(600)", limits=limits)
"""
    uses_bubblewrap = str(walls.find_bubblewrap() is not None)
    with subprocess.Popen([sys.executable, "-c", code, uses_bubblewrap]) as learner:
        _wait_for(lambda: len(_processes_with(str(memory))) >= 3)
        learner.kill()
    _wait_for(lambda: not _processes_with(str(memory)))


def _wait_for(condition):
    until = time.monotonic() + 250
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def _processes_with(argument):
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{process}/cmdline", "rb") as file:
            found += [process] * (argument.encode() in file.read().split(b"\0"))
    return found


def test_missing_namespaces_are_an_error():
    code = "from jaxrl.environments.isolation.sandbox import run_python; run_python('print(1)')"
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", forbid, sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert "SandboxError: the sandbox cannot be set up: OSError: [Errno 28]" in done.stderr
    assert "it needs Linux on x86-64 or aarch64 with user names" in done.stderr
    assert "the sandbox uses its own namespaces: " in done.stderr


def test_walls_are_reported_once(capsys, monkeypatch):
    monkeypatch.undo()
    walls._try_bubblewrap.cache_clear()
    for _ in range(2):
        found = walls.find_bubblewrap()
    walls._try_bubblewrap.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    assert walls.find_bubblewrap() is None
    walls._try_bubblewrap.cache_clear()
    *first, last = capsys.readouterr().err.splitlines()
    assert len(first) == 1
    assert ("bubblewrap's namespaces" in first[0]) == (found is not None)
    assert last == (
        "jaxrl: the sandbox uses its own namespaces: bubblewrap (bwrap) is not installed"
    )
