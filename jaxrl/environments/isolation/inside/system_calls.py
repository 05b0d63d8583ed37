"""The sandbox's filter of system calls: a seccomp program in classic BPF."""

import os
import struct

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
# io_uring makes system calls that no filter sees.
IO_URING_SETUP, CLONE3, MEMFD_SECRET = 425, 435, 447
X32 = 1 << 30  # x86_64 accepts its system calls under these numbers too
AF_INET, AF_INET6, SOCK_STREAM = 2, 10, 1
NEW_USER, PR_SET_PDEATHSIG = 1 << 28, 1
# Instructions of classic BPF, which act on one accumulator.
LOAD, AND, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06


def packed_filter() -> bytes:
    """Returns the filter of this machine's processor, as the kernel reads it."""
    machine = os.uname().machine
    if machine not in SYSTEM_CALLS:
        raise OSError(f"processor {machine} is not supported, only {', '.join(SYSTEM_CALLS)}")
    return b"".join(struct.pack("HBBI", *step) for step in filter_program(machine))


def filter_program(machine: str) -> "list[tuple[int, int, int, int]]":
    """Returns the seccomp program of a processor, in classic BPF.

    It denies UNIX and hypervisor sockets, memory outside the limits, new namespaces and the user's
    keyrings. Each instruction is (operation, instructions to skip if true, if false, number).
    """
    known = SYSTEM_CALLS[machine]
    # Offsets in the kernel's struct seccomp_data; of arguments the lower half.
    architecture, call, first, second = ((LOAD, 0, 0, offset) for offset in (4, 0, 16, 24))
    # SECCOMP_RET_ALLOW, and SECCOMP_RET_ERRNO with EPERM and with ENOSYS. Errors rather than kills:
    # programs expect errors, and libraries probe for calls.
    allow, deny, absent = ((RETURN, 0, 0, to) for to in (0x7FFF0000, 0x50000 | 1, 0x50000 | 38))
    # A 64-bit program can make 32-bit system calls, whose numbers mean other calls.
    steps = [architecture, (EQUAL, 1, 0, known["architecture"]), deny]
    steps += [call, (AT_LEAST, 0, 1, X32), deny]
    # Shared memory and queues count against no limit of a process. Keyrings belong to the user in
    # every namespace. A new user namespace gives all capabilities within it.
    for denied in (*known["denied"], IO_URING_SETUP, MEMFD_SECRET):
        steps += [(EQUAL, 0, 1, denied), deny]
    # Absent, so that libc falls back to clone, whose flags a filter can read.
    steps += [(EQUAL, 0, 1, CLONE3), absent]
    for name, then in (
        ("clone", [first, (ANY_BIT, 0, 1, NEW_USER), deny]),
        ("prctl", [first, (EQUAL, 0, 1, PR_SET_PDEATHSIG), deny]),  # it must end with its parent
        # Namespaces cut off the internet, but neither visible UNIX sockets nor the hypervisor's.
        ("socket", [first, (EQUAL, 2, 0, AF_INET), (EQUAL, 1, 0, AF_INET6), deny]),
        # asyncio needs a pair of streams. Sockets of a datagram pair could send to other addresses.
        ("socketpair", [second, (AND, 0, 0, 15), (EQUAL, 1, 0, SOCK_STREAM), deny]),
    ):
        steps += [(EQUAL, 0, len(then) + 1, known[name]), *then, allow]
    return [*steps, allow]
