"""Ties a server to the process that started it: run by `launch.py`, standard library only.

Arguments: the server's command. Standard input: a pipe whose other end only the starting process
holds, so that it closes however that one ends, by SIGKILL too. Then the whole process group is
asked to end, and ended. (The kernel's PR_SET_PDEATHSIG would look at the thread that started the
server instead, and not reach its workers.)

The exit status is the server's, and 128 + N if signal N has ended it.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys

GRACE = 15.0  # seconds between asking a server to end and ending it
_EVERY = 0.2  # seconds between two looks at the server


def main() -> int:
    """Runs the server until it ends by itself, or until the pipe closes."""
    # What asks the group to end reaches this process, too; a handler is not inherited.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    while server.poll() is None:
        if select.select([sys.stdin], [], [], _EVERY)[0]:
            os.killpg(0, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(GRACE)
            os.killpg(0, signal.SIGKILL)  # workers that have outlived it, and this process
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


if __name__ == "__main__":
    sys.exit(main())
