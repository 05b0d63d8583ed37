"""The part of the file system that a program in the sandbox sees."""

import os
import sys

WORK = "/tmp"  # an empty directory in memory, which the program may write to
PACKAGE = "/isolation/inside"  # this package: its real place may be below WORK
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
LINKS = {
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
}
_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store"),
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime"),
)


def visible_paths() -> "dict[str, str | None]":
    """Returns the visible files and directories, each with its target if it is a symbolic link.

    They hold the system's programs and libraries and Python's own: no data, configs or runs.
    """
    python = {os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)}
    found: dict[str, str | None] = {}
    for path in (*_SYSTEM, *sorted(python)):
        covered = any(os.path.commonpath([path, seen]) == seen for seen in found)
        if os.path.exists(path) and not covered:
            # Links are recreated: mounting /bin, often a link to usr/bin, would show files twice.
            is_link = os.path.islink(path)
            found[path] = os.readlink(path) if is_link else None
    return found
