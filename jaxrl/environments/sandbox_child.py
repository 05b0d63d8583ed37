"""The walls around a program: run by `sandbox.py` with `python -I -S`, standard library only.

Arguments: seconds, memory, processes, output. Standard input: the code.

The first process makes the namespaces and stays outside of the last one, to count the time and the
output; the second is the program's. The last line on the standard error is the program's exit
status and whether it ended in time. Another exit status than 0 is that of walls which could not be
set up.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import time
import traceback

NEW_USER, NEW_MOUNTS, NEW_NET, NEW_IPC, NEW_PIDS = 1 << 28, 1 << 17, 1 << 30, 1 << 27, 1 << 29
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 1 << 14, 1 << 18
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
NOBODY = 65534
WORK = b"/tmp"

libc = ctypes.CDLL(None, use_errno=True)


def must(result: int, what: str) -> None:
    """Raises OSError unless a call of the C library has returned 0."""
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def write(path: str, text: str) -> None:
    """Writes a file of the kernel."""
    with open(path, "w") as file:
        file.write(text)


def make_namespaces() -> None:
    """A user without a name, no network, no processes; the next child is the first of them."""
    user, group = os.getuid(), os.getgid()
    must(libc.unshare(NEW_USER | NEW_MOUNTS | NEW_NET | NEW_IPC | NEW_PIDS), "unshare")
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{NOBODY} {user} 1")
    write("/proc/self/gid_map", f"{NOBODY} {group} 1")


def wall_off(memory: int) -> None:
    """Everything read-only but an empty directory; no privileges to undo it."""
    must(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "private mounts")
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    changed = libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, size)
    must(changed, "read-only mounts")
    options = f"size={memory},mode=700".encode()
    must(libc.mount(b"none", WORK, b"tmpfs", MS_NOSUID | MS_NODEV, options), "a directory")
    os.chdir(WORK)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # beyond the last one it says so
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    must(libc.capset(header, none), "no capabilities")
    must(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")


def run(code: bytes, *, seconds: float, memory: int, processes: int, ready: int) -> None:
    """The program, in the second process."""
    wall_off(memory)
    for kind, most in (
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, memory),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    os.write(ready, b"1")
    os.close(ready)
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        exec(compile(code, "program.py", "exec"), names)
    except Exception as error:
        shown = error.__traceback__ and error.__traceback__.tb_next  # without this line
        traceback.print_exception(type(error), error, shown)
        sys.exit(1)


def relay(streams: "dict[int, int]", *, until: float, most: int) -> bool:
    """Passes on what the program prints, up to `most` bytes of each stream, until both are closed;
    False if the time is over before."""
    left = dict.fromkeys(streams, most)
    while streams:
        wait = until - time.monotonic()
        if wait <= 0:
            return False
        for stream in select.select(list(streams), [], [], wait)[0]:
            data = os.read(stream, 1 << 16)
            if not data:
                del streams[stream]
                continue
            os.write(streams[stream], data[: left[stream]])
            left[stream] -= min(len(data), left[stream])
    return True


def main() -> int:
    """Both processes; see above."""
    seconds, (memory, processes, output) = float(sys.argv[1]), map(int, sys.argv[2:5])
    code = sys.stdin.buffer.read()
    pipes = [os.pipe(), os.pipe(), os.pipe()]
    make_namespaces()
    child = os.fork()
    if child == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for target, (_, its_end) in enumerate(pipes, start=1):
            os.dup2(its_end, target)
        os.closerange(4, 256)
        run(code, seconds=seconds, memory=memory, processes=processes, ready=3)
        return 0
    for _, its_end in pipes:
        os.close(its_end)
    prints = {pipes[0][0]: 1, pipes[1][0]: 2}
    in_time = relay(prints, until=time.monotonic() + seconds, most=output)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.read(pipes[2][0], 1) != b"1":
        return 1
    os.write(2, f"\n{os.waitstatus_to_exitcode(status)} {int(in_time)}".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
