"""The first Python function behind the walls, started by `sandbox.py` with `python -I -S`.

Arguments: role, walls, the caller's process number, seconds, memory, processes, and file
descriptors: control, source and, for the roles of tests, those to receive from and to send to.

A byte on the control descriptor says that the sandbox is set up. The role `program` runs the
source. The roles `code` and `tests` are the two sides of a test: see `serving.py` and `testing.py`.
Only trusted code runs in `tests`; it keeps the control descriptor, to report the outcome.
"""

import os
import resource
import sys
import types

from .source import run_source
from .view import PACKAGE

FILES = 64  # open at once: pipes and sockets hold memory too


def main() -> None:
    """Sets up the walls and the limits, then plays its role."""
    role, walls = sys.argv[1:3]
    caller, seconds, memory, processes, control, source, *pipes = map(int, sys.argv[3:])
    with open(source, "rb") as file:
        text = file.read()
    if walls == "own":
        from .own_walls import enter

        enter(caller=caller, memory=memory)
        sys.modules["inside"].__path__[:] = [PACKAGE]  # for the imports below
    # The program must not see its limits and descriptors.
    sys.argv[:] = [""]
    # After the walls, because their fork must not count against the program's limits.
    for kind, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, memory),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    if role == "tests":
        # Imported before the process reports that it is ready, at no cost to the tests' time.
        from .testing import run_tests

        os.write(control, b"1")
        run_tests(text, pipes, control)
    else:
        os.write(control, b"1")
        # What follows is untrusted, and must not be able to report that tests passed.
        os.close(control)
    if role == "code":
        from .serving import serve

        serve(text, pipes)
    if role == "program":
        run_source(text, types.ModuleType("__main__"))
