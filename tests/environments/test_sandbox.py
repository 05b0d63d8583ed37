"""Attempts to escape the sandbox, and the reward that runs unit tests in it."""

import os
import subprocess
import sys
import time

import pytest

from jaxrl.environments.isolation import sandbox
from jaxrl.environments.isolation.sandbox import SandboxError, SandboxLimits, run_python
from jaxrl.environments.isolation.sandbox_child import SYSTEM_CALLS, filter_program
from jaxrl.environments.rewards.builtin import python_tests


def test_status_and_streams_are_returned():
    ran = run_python("import sys\nprint(repr(sys.stdin.read()))\nsys.exit(97)")
    assert (ran.status, ran.stdout, ran.stderr, ran.timed_out) == (97, "''\n", "", False)


def test_a_traceback_shows_only_the_programs_own_lines():
    ran = run_python("def f():\n    return 1 / 0\n\nf()")
    assert ran.status == 1
    assert ran.stderr.count("File ") == 2
    assert ran.stderr.endswith("ZeroDivisionError: division by zero\n")


ESCAPES = {
    "network": "import socket; socket.create_connection(('127.0.0.1', 22), timeout=1)",
    "names": "import socket; socket.getaddrinfo('example.org', 80)",
    "writing": "open('{there}/new', 'w')",
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
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        calls = SYSTEM_CALLS[os.uname().machine]
        names = {"clone": calls["clone"], "keyctl": calls["denied"][5]}
        code = ESCAPES[way].format(there=tmp_path, pid=other.pid, **names)
        ran = run_python(code, limits=SandboxLimits(seconds=20.0, memory=256 << 20))
        assert ran.status != 0, ran
        assert ran.stderr, ran
        assert not ran.timed_out
        assert other.poll() is None
        other.kill()
    assert os.listdir(tmp_path) == ["kept"]
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


def test_a_masked_proc_is_replaced_by_an_empty_one():
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
def test_the_filter_denies_exactly_the_listed_system_calls(machine):
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


def test_a_program_does_not_inherit_its_users_terminal():
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
        "import time; time.sleep(100)",
        "import os, time\nos.fork()\nos.setsid() if os.getpid() != 1 else None\ntime.sleep(100)",
        "import os\nfor _ in range(6): os.fork()\nwhile True: pass",
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(100)",
        "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(100)",
    ],
)
def test_a_timeout_kills_the_program_and_its_children(code):
    start = time.monotonic()
    ran = run_python("print('begun', flush=True)\n" + code, limits=SandboxLimits(seconds=1.0))
    assert ran.timed_out
    assert ran.stdout == "begun\n"
    assert time.monotonic() - start < 60


def test_output_is_truncated_at_the_limit():
    ran = run_python("while True: print('x' * 999)", limits=SandboxLimits(seconds=1.0, output=5000))
    assert len(ran.stdout) == 5000


def test_without_namespaces_nothing_runs_and_an_error_is_raised(monkeypatch, tmp_path):
    broken = tmp_path / "child.py"
    source = sandbox._CHILD.read_text()
    broken.write_text(source.replace("check(libc.unshare(", "check(libc.unshare(1 | "))
    monkeypatch.setattr(sandbox, "_CHILD", broken)
    with pytest.raises(SandboxError, match=r"Invalid argument; it needs Linux on .* user names"):
        run_python("print('free')")


def test_code_is_rewarded_if_all_tests_pass():
    tests = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
    right = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
    wrong = "```python\ndef add(a, b):\n    return a - b\n```"
    leaves = "```python\nimport os\nos._exit(0)\n```"
    assert python_tests(right, {"tests": tests}) == 1
    assert python_tests(right, {"tests": "\n".join(tests)}) == 1
    assert python_tests("def add(a, b): return a + b", {"tests": tests}) == 1
    assert python_tests(wrong, {"tests": tests}) == 0
    assert python_tests(leaves, {"tests": tests}) == 0
    assert python_tests("no code", {"tests": tests}) == 0


def test_tests_import_the_code_and_skip_its_main_program():
    code = """
from __future__ import annotations
import dataclasses

@dataclasses.dataclass
class Sum:
    value: int

def add(a, b):
    return Sum(a + b)

if __name__ == "__main__":
    print(add(int(input()), 2))
"""
    assert python_tests(code, {"tests": ["assert add(1, 2).value == 3"]}) == 1
    assert "EOFError" in run_python(code).stderr


CHEATS = {
    "constants": "frame.f_code.co_consts",
    "what the caller holds": "[*frame.f_back.f_locals.values(), *frame.f_back.f_code.co_consts]",
    "everything": "gc.get_objects()",
}


@pytest.mark.parametrize("place", CHEATS)
@pytest.mark.parametrize("when", ["at once", "when tested"])
def test_code_cannot_find_the_token_that_proves_success(place, when):
    find = f"""
import gc, os, re, sys
def add(a, b):
    frame = sys._getframe(1)
    found = re.findall("['\\"]([0-9a-f]{{16}})['\\"]", repr({CHEATS[place]}))
    print(*found, sep="\\n", flush=True)
    os._exit(0)
"""
    code = find + ("add(1, 2)" if when == "at once" else "")
    assert python_tests(code, {"tests": "assert add(1, 2) == 3"}) == 0


def test_a_part_enters_the_process_only_after_the_parts_before_it():
    parts = ["y = x + 1", "print(x, y)", "#" * (1 << 20) + "\nprint(__name__)"]
    assert run_python("x = 1", then=parts).stdout == "1 2\nprogram\n"
    ran = run_python("x = 1", then=["1 / 0", "print(x)"])
    assert (ran.status, ran.stdout) == (1, "")
    assert ran.stderr.endswith("ZeroDivisionError: division by zero\n")
    asks = "import os\nfor _ in range(3): os.write(4, b'1')\nwhile True: pass"
    assert run_python(asks, then=["#" * (1 << 20)], limits=SandboxLimits(seconds=1.0)).timed_out
