"""The sandbox's walls: bubblewrap where it works, else namespaces made by the sandbox itself."""

import compileall
import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from jaxrl.environments.isolation.inside.system_calls import packed_filter
from jaxrl.environments.isolation.inside.view import DEVICES, LINKS, PACKAGE, WORK, visible_paths

_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
_INSIDE = Path(__file__).resolve().with_name("inside")
_finding = threading.Lock()
# With -I -S Python ignores the user's variables and site-packages, so this package is put on the
# path by hand: last, so that it hides no module of Python, and only until it is imported.
_START = "import sys; sys.path.append(%r); from inside.host import main; del sys.path[-1]; main()"


def start(
    role: str, arguments: Sequence[int], *, memory: int, keep: Sequence[int]
) -> "subprocess.Popen[bytes]":
    """Starts a host (`inside/host.py`) behind walls, with the file descriptors of `keep`.

    The process outside the walls is killed when the calling thread ends, and the host with it.
    """
    bubblewrap = find_bubblewrap()
    # The interpreter of a virtual environment is a link to this one; nothing else of it is needed.
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    # Told apart by an argument, because inside bubblewrap there is nothing left to set up.
    walls = "own" if bubblewrap is None else "bubblewrap"
    here = str(_INSIDE.parent) if bubblewrap is None else os.path.dirname(PACKAGE)
    host = [python, "-I", "-S", "-c", _START % here, role, walls, str(os.getpid())]
    command = [*host, *map(str, arguments)]
    # bubblewrap installs the filter last, after all system calls that the filter denies.
    code = memory_file(packed_filter()) if bubblewrap else None
    if bubblewrap and code is not None:
        command = [bubblewrap, *bubblewrap_options(memory), "--seccomp", str(code), *command]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_ENVIRONMENT,
            pass_fds=[*keep] if code is None else [*keep, code],
            start_new_session=True,  # with a terminal it could type into the user's shell
        )
    finally:
        if code is not None:
            os.close(code)


def find_bubblewrap() -> str | None:
    """Returns bubblewrap's path if it works on this machine; reports once which walls are used."""
    # With functools.cache alone several threads would try and report.
    with _finding:
        return _try_bubblewrap()


@functools.cache
def _try_bubblewrap() -> str | None:
    path = shutil.which("bwrap")
    if path is None:
        error = "bubblewrap (bwrap) is not installed"
    else:
        try:
            # It may be installed and not work: containers often forbid the namespaces it needs.
            command = [path, *bubblewrap_options(1 << 20), "true"]
            tried = subprocess.run(command, capture_output=True, timeout=30, check=False)
            error = tried.stderr.decode(errors="replace").strip() if tried.returncode else None
        except (OSError, subprocess.TimeoutExpired) as failed:
            error = str(failed)
    # Their directory is read-only inside, so each start would compile them again.
    compileall.compile_dir(_INSIDE, quiet=2)
    using = "bubblewrap's namespaces" if error is None else "its own namespaces"
    reason = f": {error}" if error else ""
    print(f"jaxrl: the sandbox uses {using}{reason}", file=sys.stderr, flush=True)
    return path if error is None else None


def bubblewrap_options(memory: int) -> list[str]:
    """Returns the options that make the walls, except the filter of system calls."""
    # --unshare-all continues without a user namespace if the kernel refuses one; --unshare-user
    # fails. When a program that is PID 1 ends, all processes that it started end too.
    options = ["--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534"]
    options += ["--cap-drop", "ALL", "--die-with-parent", "--new-session", "--as-pid-1"]
    # Files of a tmpfs are memory: without a size the program could take all of the machine's.
    options += ["--size", str(memory), "--perms", "0700", "--tmpfs", WORK, "--proc", "/proc"]
    for path, target in visible_paths().items():
        options += ["--ro-bind", path, path] if target is None else ["--symlink", target, path]
    options += ["--ro-bind", str(_INSIDE), PACKAGE]
    for device in DEVICES:
        options += ["--dev-bind", device, device]
    for link, target in LINKS.items():
        options += ["--symlink", target, link]
    return [*options, "--remount-ro", "/proc", "--remount-ro", "/", "--chdir", WORK]


def memory_file(data: bytes) -> int:
    """Returns a descriptor of a file in memory, positioned at its beginning."""
    # The file has no path: nothing is left behind, and no other user can open it.
    descriptor = os.memfd_create("sandbox")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
