"""Servers end with the process that started them; sleeping programs stand in for vLLM."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl.bridge.servers.launch import LocalServer, ServerFailedError, ServerOptions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
STARTS = """
import sys, time
from pathlib import Path
from jaxrl.bridge.servers.launch import LocalServer, ServerOptions
options = ServerOptions(python=Path(sys.argv[1]), dtype="float32")
server = LocalServer(Path("model"), options, log=Path(sys.argv[2]))
print(server.process_ids[0], flush=True)
time.sleep(300)
"""


def program(path: Path, text: str) -> Path:
    """Writes an executable shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def alive(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def wait_for(condition) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it never happened")


def test_a_server_and_its_workers_end_with_a_killed_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    serves = program(
        tmp_path / "serves",
        f"(trap '' TERM; while true; do sleep 1; done) & echo $! >> {pids}\n"
        f"echo $$ >> {pids}\nexec sleep 300",
    )
    command = [sys.executable, "-c", STARTS, str(serves), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as learner:
        try:
            assert learner.stdout is not None
            watchdog = int(learner.stdout.readline())
            wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
            processes = [watchdog, *map(int, pids.read_text().split())]
            assert all(map(alive, processes))
        finally:
            learner.kill()
    wait_for(lambda: not any(map(alive, processes)))


def test_a_server_ends_with_its_block_and_reports_its_status(tmp_path: Path) -> None:
    sleeps = ServerOptions(python=program(tmp_path / "sleeps", "exec sleep 300"), dtype="float32")
    with LocalServer(Path("model"), sleeps, log=tmp_path / "log") as server:
        wait_for(lambda: len(server.process_ids) == 2)  # the watchdog and the server
        server.check()
        found = server.process_ids
    wait_for(lambda: not any(map(alive, found)))
    for name, text, status in [("ends", "exit 3", 3), ("dies", "kill -9 $$", 128 + 9)]:
        options = ServerOptions(python=program(tmp_path / name, text), dtype="float32")
        with (
            LocalServer(Path("model"), options, log=tmp_path / "log") as server,
            pytest.raises(ServerFailedError, match=f"status {status};"),
        ):
            server.wait(lambda seconds: None)


def test_a_stopped_server_ends(tmp_path: Path) -> None:
    """Like a server that hangs in the kernel, it does not react to SIGTERM."""
    sleeps = ServerOptions(python=program(tmp_path / "sleeps", "exec sleep 300"), dtype="float32")
    with (
        pytest.MonkeyPatch.context() as patch,
        LocalServer(Path("model"), sleeps, log=tmp_path / "log") as server,
    ):
        patch.setattr("jaxrl.bridge.servers.watchdog.GRACE", 0)
        wait_for(lambda: len(server.process_ids) == 2)
        found = server.process_ids
        for process in found:
            os.kill(process, signal.SIGSTOP)
    wait_for(lambda: not any(map(alive, found)))


def test_a_program_on_the_port_is_not_mistaken_for_the_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        options = ServerOptions(python=tmp_path / "none", dtype="float32", port=port)
        with pytest.raises(ServerFailedError, match=f"127.0.0.1:{port}: .*in use"):
            LocalServer(Path("model"), options, log=tmp_path / "log")
