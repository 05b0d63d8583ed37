"""vLLM servers for programs that kill them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxrl.bridge import VllmServer, free_port

COMMAND = [sys.executable, "-m", "jaxrl.cli"]
SERVERS = 2


@contextmanager
def servers(model: Path, *, log: Path, **options: object) -> Iterator[list[int]]:
    """Runs servers that restart after a failure, with options of `jaxrl serve`; yields their
    ports."""
    first = free_port("127.0.0.1", 0)
    keys = {"dtype": "f32", "port": first, "replicas": SERVERS, "log": log, **options}
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    with subprocess.Popen([*COMMAND, "serve", str(model), *words]) as supervisor:
        try:
            ports = [first + i for i in range(SERVERS)]
            while not all(healthy(port) for port in ports):
                if supervisor.poll() is not None:
                    raise RuntimeError(f"the servers did not start; see {log}")
                time.sleep(1)
            yield ports
        finally:
            supervisor.terminate()


def healthy(port: int) -> bool:
    """Tells whether the server on a port answers that it is ready."""
    return VllmServer(f"http://127.0.0.1:{port}", timeout=5.0).healthy()


def processes(*words: str) -> list[int]:
    """Returns the processes whose command has these words."""
    found, wanted = [], {os.fsencode(word) for word in words}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and wanted <= {*(entry / "cmdline").read_bytes().split(b"\0")}:
                found.append(int(entry.name))
    return found


def kill_server(port: int) -> bool:
    """Kills all processes of the server on a port; returns True once it is gone."""
    for process in processes("vllm.entrypoints.openai.api_server", str(port)):
        with contextlib.suppress(OSError):
            os.killpg(os.getpgid(process), signal.SIGKILL)
    until = time.monotonic() + 5.0
    while (there := healthy(port)) and time.monotonic() < until:
        time.sleep(0.1)
    return not there
