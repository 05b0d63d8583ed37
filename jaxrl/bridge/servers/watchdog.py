"""Ends a server together with the process that started it.

`launch.py` runs this program, which uses the standard library only. Its arguments are the server's
command. Its standard input is a pipe that closes when the starting process ends, even by SIGKILL;
the whole process group then gets SIGTERM and later SIGKILL. The kernel's PR_SET_PDEATHSIG would
watch the starting thread instead and would not reach the server's workers.

The exit status is the server's, or 128 + N if signal N ended it.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys

GRACE = 15.0  # seconds between SIGTERM and SIGKILL
_POLL = 0.2  # seconds between two checks of the server


def main() -> int:
    """Runs the server until it ends or the pipe closes."""
    # SIGTERM to the group reaches this process too. Unlike SIG_IGN, a handler is not inherited.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    while server.poll() is None:
        if select.select([sys.stdin], [], [], _POLL)[0]:
            os.killpg(0, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(GRACE)
            os.killpg(0, signal.SIGKILL)  # remaining workers, and this process
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


if __name__ == "__main__":
    sys.exit(main())
