"""The first Python function behind the walls, started by `sandbox.py` with `python -I -S`.

Arguments: role, walls, the caller's process number, seconds, memory, processes, and file
descriptors: control, source and, for the roles of tests, those to receive from and to send to.

A byte on the control descriptor says that the sandbox is set up. The role `program` runs the
source. The roles `code` and `tests` are the two sides of a test: see `code.py` and `tests.py`.
Only trusted code runs in `tests`; it keeps the control descriptor, to report the outcome.
"""

import os
import resource
import sys
import types

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
    sys.argv[:] = [""]
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
        from .testing import run_tests

        os.write(control, b"1")
        run_tests(text, pipes, control)
    else:
        os.write(control, b"1")
        os.close(control)
    if role == "code":
        from .serving import serve

        serve(text, pipes)
    if role == "program":
        run_source(text, types.ModuleType("__main__"))


def run_source(source: bytes, module: types.ModuleType) -> None:
    """Runs a program in a module; ends the process if it raises."""
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, "program.py", "exec"), module.__dict__)
    except Exception as error:
        import traceback

        shown = error.__traceback__ and error.__traceback__.tb_next  # without this function
        traceback.print_exception(type(error), error, shown)
        sys.exit(1)
