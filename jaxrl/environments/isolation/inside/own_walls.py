"""The sandbox's walls on a machine without bubblewrap: namespaces, mounts and a filter."""

import ctypes
import os
import signal
import struct

from .system_calls import packed_filter
from .view import DEVICES, LINKS, PACKAGE, WORK, visible_paths

NEW_USER, NEW_MOUNTS, NEW_NET, NEW_IPC, NEW_PIDS = 1 << 28, 1 << 17, 1 << 30, 1 << 27, 1 << 29
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 1 << 14, 1 << 18
# These system calls have the same number on every processor.
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = 1, 4
AT_FDCWD, AT_RECURSIVE, AT_EMPTY_PATH = -100, 0x8000, 0x1000
MOUNT_ATTR_RDONLY, MNT_DETACH = 1, 2
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
NOBODY = 65534

libc = ctypes.CDLL(None, use_errno=True)


def enter(*, caller: int, memory: int) -> None:
    """Continues in a child process behind walls, as PID 1 of its namespace.

    The calling process stays outside, where the child can neither see nor signal it, and exits
    with the child's status: 128 + N after signal N. Both end when the process `caller` does.
    """
    make_namespaces()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # new credentials would clear it
    # If the caller ended before prctl, no signal will ever come.
    if os.getppid() != caller:
        os._exit(1)
    life, held = os.pipe()  # closes when this process ends, which tells the child
    child = os.fork()
    if child:
        # Open copies would hide from the pipes' readers that the program has closed them.
        os.closerange(0, held)
        os.closerange(held + 1, 256)
        _, status = os.waitpid(child, 0)
        status = os.waitstatus_to_exitcode(status)
        os._exit(status if status >= 0 else 128 - status)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.close(held)
    os.set_blocking(life, False)
    try:
        os.read(life, 1)
        os._exit(1)  # the parent ended before prctl
    except BlockingIOError:
        os.close(life)
    # A signal to the process group reaches members outside the PID namespace too.
    os.setsid()
    confine(memory)


def check(result: int, what: str) -> None:
    """Raises OSError unless a C library call returned 0."""
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def make_namespaces() -> None:
    """Creates namespaces for users, mounts, network, IPC and PIDs; the next child gets PID 1."""
    # Read first: in a new namespace without a map every user is nobody.
    user, group = os.getuid(), os.getgid()
    check(libc.unshare(NEW_USER | NEW_MOUNTS | NEW_NET | NEW_IPC | NEW_PIDS), "unshare")
    # Only a process that gave up setgroups may map its group without privileges.
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{NOBODY} {user} 1"),
        ("gid_map", f"{NOBODY} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def confine(memory: int) -> None:
    """Leaves a read-only view of a few paths and an empty directory; removes all privileges."""
    # Mounts made here must not appear outside, where systemd makes / shared by default.
    check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "private mounts")
    shown = visible_paths()
    links = {**LINKS, **{path: target for path, target in shown.items() if target}}
    # Copied before /tmp is covered, because Python or this package may lie below it.
    copies = {path: copy_mounts(path) for path in (*shown, *DEVICES) if path not in links}
    is_directory = {path: os.path.isdir(path) for path in copies} | {PACKAGE: True}
    copies[PACKAGE] = copy_mounts(os.path.dirname(os.path.realpath(__file__)))
    # Any directory could become the root; /tmp exists on every machine.
    check(libc.mount(b"none", b"/tmp", b"tmpfs", MS_NOSUID, b"size=1m,mode=755"), "a new root")
    os.chdir("/tmp")
    os.mkdir(WORK[1:])
    options = f"size={memory},mode=700".encode()
    work = WORK[1:].encode()
    check(libc.mount(b"none", work, b"tmpfs", MS_NOSUID | MS_NODEV, options), "a directory")
    for path, copy in copies.items():
        place(copy, path[1:], is_directory=is_directory[path])
    os.mkdir("proc")
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
    if libc.mount(b"proc", b"proc", b"proc", flags, None) != 0:
        # A container with a masked /proc may not mount another, so the program gets an empty one.
        check(libc.mount(b"none", b"proc", b"tmpfs", flags, None), "an empty /proc")
    for path, target in links.items():
        os.makedirs(os.path.dirname(path)[1:] or ".", exist_ok=True)
        os.symlink(target, path[1:])
    # The old root now lies on top of the new one, at the same path (pivot_root(2)). It can only be
    # detached, because it is in use.
    check(libc.pivot_root(b".", b"."), "a new root")
    check(libc.umount2(b".", MNT_DETACH), "hiding the old root")
    # Not recursively: the work directory stays writable, and the copies are read-only already.
    make_readonly(AT_FDCWD, b"/", 0)
    os.chdir(WORK)
    drop_privileges()


def copy_mounts(path: str) -> int:
    """Returns a read-only copy of the mounts at and below a path."""
    # The older call, mount with MS_BIND, would make only the top mount read-only.
    copy = libc.syscall(OPEN_TREE, AT_FDCWD, path.encode(), OPEN_TREE_CLONE | AT_RECURSIVE)
    check(min(copy, 0), path)
    make_readonly(copy, b"", AT_EMPTY_PATH | AT_RECURSIVE)
    return copy


def make_readonly(directory: int, path: bytes, flags: int) -> None:
    """Makes a mount read-only; with AT_RECURSIVE all mounts below it too."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    changed = libc.syscall(MOUNT_SETATTR, directory, path, flags, attributes, size)
    check(changed, "read-only mounts")


def place(copy: int, path: str, *, is_directory: bool) -> None:
    """Mounts a copy at a path below the working directory."""
    os.makedirs(path if is_directory else os.path.dirname(path), exist_ok=True)
    if not is_directory:
        os.close(os.open(path, os.O_CREAT))
    moved = libc.syscall(MOVE_MOUNT, copy, b"", AT_FDCWD, path.encode(), MOVE_MOUNT_F_EMPTY_PATH)
    check(moved, path)
    os.close(copy)


def drop_privileges() -> None:
    """Gives up all capabilities and installs the filter of system calls."""
    # The order matters: dropping from the bounding set takes a capability, and without one only a
    # process with no_new_privs may install a filter. The filter is last, since it denies calls made
    # above.
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for numbers past the last one
    # The third version of the capabilities' format: two words for each of the three sets.
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    check(libc.capset(header, none), "no capabilities")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    code = packed_filter()
    steps = ctypes.create_string_buffer(code)
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(steps))
    check(libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0), "a filter of system calls")
