"""The sandbox's child process: run by `sandbox.py` with `python -I -S`, standard library only.

Arguments: seconds, memory, processes, output. Standard input: the parts of the program, each after
a line with the number of parts that follow and its length in bytes.

The first process creates the namespaces, stays outside the PID namespace and enforces the limits on
time and output. The second hands out the parts. The third runs the program and requests a part when
it has run all earlier ones. The last line of standard error holds the program's exit status, and 1
if it ended in time. A nonzero exit status means that the sandbox could not be set up.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import struct
import sys
import time
import traceback
import types

NEW_USER, NEW_MOUNTS, NEW_NET, NEW_IPC, NEW_PIDS = 1 << 28, 1 << 17, 1 << 30, 1 << 27, 1 << 29
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 1 << 14, 1 << 18
# These system calls have the same number on every processor.
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH, AT_FDCWD, AT_RECURSIVE = 1, 4, -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NODEV = 1, 4
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
NOBODY = 65534
FILES = 64  # open at once: pipes and sockets hold memory too
WORK = b"/tmp"
DEVICES = (b"/dev/null", b"/dev/zero", b"/dev/random", b"/dev/urandom")
LINKS = {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}  # /dev -> /proc/self

# System-call numbers by processor, as os.uname() names it. "denied" lists shmget, msgget,
# memfd_create, add_key, request_key, keyctl and unshare, in this order.
SYSTEM_CALLS = {
    "x86_64": {
        "architecture": 0xC000003E,
        "denied": (29, 68, 319, 248, 249, 250, 272),
        "clone": 56,
        "prctl": 157,
        "socket": 41,
        "socketpair": 53,
    },
    "aarch64": {
        "architecture": 0xC00000B7,
        "denied": (194, 186, 279, 217, 218, 219, 97),
        "clone": 220,
        "prctl": 167,
        "socket": 198,
        "socketpair": 199,
    },
}
IO_URING_SETUP, CLONE3, MEMFD_SECRET = 425, 435, 447
X32 = 1 << 30  # x86_64 accepts its system calls under these numbers too
AF_INET, AF_INET6, SOCK_STREAM = 2, 10, 1
# Instructions of classic BPF, which act on one accumulator.
LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    """Raises OSError unless a C library call returned 0."""
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def make_namespaces() -> None:
    """Creates namespaces for users, mounts, network, IPC and PIDs; the next child gets PID 1."""
    user, group = os.getuid(), os.getgid()
    check(libc.unshare(NEW_USER | NEW_MOUNTS | NEW_NET | NEW_IPC | NEW_PIDS), "unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {user} 1"),
        ("gid_map", f"{NOBODY} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def confine(memory: int) -> None:
    """Makes everything read-only except an empty directory; removes devices and privileges, and
    hides other processes."""
    check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "private mounts")
    devices = [libc.syscall(OPEN_TREE, AT_FDCWD, path, OPEN_TREE_CLONE) for path in DEVICES]
    restrict(b"/", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV)
    mount_devices(devices)
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
    if libc.mount(b"proc", b"/proc", b"proc", flags, None) != 0:
        # A container with a masked /proc may not mount another; the program gets an empty one.
        check(libc.mount(b"none", b"/proc", b"tmpfs", flags, None), "an empty /proc")
    options = f"size={memory},mode=700".encode()
    check(libc.mount(b"none", WORK, b"tmpfs", MS_NOSUID | MS_NODEV, options), "a directory")
    os.chdir(WORK)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for numbers past the last one
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    check(libc.capset(header, none), "no capabilities")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    install_filter()


def restrict(path: bytes, flags: int) -> None:
    """Sets flags of a mount and of all mounts below it."""
    attributes = (ctypes.c_uint64 * 4)(flags, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    changed = libc.syscall(MOUNT_SETATTR, AT_FDCWD, path, AT_RECURSIVE, attributes, size)
    check(changed, "read-only mounts")


def mount_devices(devices: "list[int]") -> None:
    """Mounts a /dev that holds only `DEVICES`, from open copies of their mounts."""
    check(libc.mount(b"none", b"/dev", b"tmpfs", MS_NOSUID, b"size=64k,mode=755"), "an empty /dev")
    for path, copy in zip(DEVICES, devices, strict=True):
        os.close(os.open(path, os.O_CREAT))
        moved = libc.syscall(MOVE_MOUNT, copy, b"", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH)
        check(moved, path.decode())
        os.close(copy)
    for name, target in LINKS.items():
        os.symlink(f"/proc/self/{target}", f"/dev/{name}")
    restrict(b"/dev", MOUNT_ATTR_RDONLY)


def install_filter() -> None:
    """Denies the system calls that bypass namespaces and mounts."""
    machine = os.uname().machine
    if machine not in SYSTEM_CALLS:
        raise OSError(f"processor {machine} is not supported, only {', '.join(SYSTEM_CALLS)}")
    steps = filter_program(machine)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HP", len(steps), ctypes.addressof(code))
    check(libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0), "a filter of system calls")


def filter_program(machine: str) -> "list[tuple[int, int, int, int]]":
    """Returns the seccomp program of a processor, in classic BPF.

    It denies UNIX and hypervisor sockets, memory outside the limits, new namespaces and the user's
    keyrings. Each instruction is (operation, instructions to skip if true, if false, number).
    """
    known = SYSTEM_CALLS[machine]
    architecture, call, first, second = ((LOAD, 0, 0, offset) for offset in (4, 0, 16, 24))
    allow, deny, absent = ((RETURN, 0, 0, to) for to in (0x7FFF0000, 0x50000 | 1, 0x50000 | 38))
    steps = [architecture, (EQUAL, 1, 0, known["architecture"]), deny]
    steps += [call, (AT_LEAST, 0, 1, X32), deny]
    for denied in (*known["denied"], IO_URING_SETUP, MEMFD_SECRET):
        steps += [(EQUAL, 0, 1, denied), deny]
    # Absent, so that libc falls back to clone, whose flags a filter can read.
    steps += [(EQUAL, 0, 1, CLONE3), absent]
    for name, then in (
        ("clone", [first, (ANY_BIT, 0, 1, NEW_USER), deny]),
        ("prctl", [first, (EQUAL, 0, 1, PR_SET_PDEATHSIG), deny]),  # it must end with its parent
        ("socket", [first, (EQUAL, 2, 0, AF_INET), (EQUAL, 1, 0, AF_INET6), deny]),
        ("socketpair", [second, (AND, 0, 0, 15), (EQUAL, 1, 0, SOCK_STREAM), deny]),
    ):
        steps += [(EQUAL, 0, len(then) + 1, known[name]), *then, allow]
    return [*steps, allow]


def run(ready: int, asks: int, given: int, *, seconds: float, memory: int, processes: int) -> None:
    """Runs the program, in the third process."""
    confine(memory)
    for kind, most in (
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, memory),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    os.write(ready, b"1")
    os.close(ready)
    module = None
    with os.fdopen(given, "rb") as parts:
        following = 1
        while following:
            os.write(asks, b"1")
            following, length = map(int, parts.readline().split())
            # Later parts use the module as if they had imported it.
            module = module or types.ModuleType("program" if following else "__main__")
            sys.modules[module.__name__] = module
            run_part(parts.read(length), module)


def run_part(code: bytes, module: types.ModuleType) -> None:
    """Runs code in a module; ends the process if it raises."""
    try:
        exec(compile(code, "program.py", "exec"), module.__dict__)
    except Exception as error:
        shown = error.__traceback__ and error.__traceback__.tb_next  # without this function
        traceback.print_exception(type(error), error, shown)
        sys.exit(1)


def hand_over(asks: int, gives: int) -> None:
    """Sends a part whenever the program requests one, in the second process."""
    with (
        contextlib.suppress(BrokenPipeError),  # the program has ended
        open(0, "rb", closefd=False) as parts,
        open(gives, "wb", buffering=0) as pipe,
    ):
        while os.read(asks, 1) and (line := parts.readline()):
            pipe.write(line + parts.read(int(line.split()[1])))


def relay(streams: "dict[int, int]", *, until: float, most: int) -> bool:
    """Copies the program's streams, up to `most` bytes of each, until both are closed.

    Returns False if the time is over first.
    """
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


def wait_for_exit(child: int, *, until: float) -> bool:
    """Waits for a process, which may have closed its streams long before.

    Returns False if the time is over first.
    """
    wait = max(0.0, until - time.monotonic())
    return bool(select.select([os.pidfd_open(child)], [], [], wait)[0])


def main() -> int:
    """Runs all three processes; see the module's docstring."""
    seconds, (memory, processes, output) = float(sys.argv[1]), map(int, sys.argv[2:5])
    prints, errors, ready, asks, gives = (os.pipe() for _ in range(5))
    its_ends = (prints[1], errors[1], ready[1], asks[1], gives[0])
    if os.fork() == 0:
        # Outside the namespaces: the program must not see the parts before it requests them.
        for end in (1, 2, *its_ends):
            os.close(end)
        hand_over(asks[0], gives[1])
        return 0
    os.close(asks[0])
    os.close(gives[1])
    make_namespaces()
    child = os.fork()
    if child == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        nothing, end = os.pipe()
        os.close(end)
        for target, its_end in enumerate((nothing, *its_ends)):
            os.dup2(its_end, target, inheritable=target < 3)
        os.closerange(6, 256)
        run(3, 4, 5, seconds=seconds, memory=memory, processes=processes)
        return 0
    for end in its_ends:
        os.close(end)
    up = os.read(ready[0], 1) == b"1"
    until = time.monotonic() + seconds
    streams = {prints[0]: 1, errors[0]: 2}
    in_time = relay(streams, until=until, most=output) and wait_for_exit(child, until=until)
    if not in_time:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not up:
        return 1
    os.write(2, f"\n{os.waitstatus_to_exitcode(status)} {int(in_time)}".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
