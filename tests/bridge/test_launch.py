"""Servers end with the process that started them; sleeping programs stand in for vLLM."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl.bridge.owned_directory import BELONGINGS, MEMORY, OwnedDirectory
from jaxrl.bridge.servers import launch, watchdog
from jaxrl.bridge.servers.launch import Device, LocalServer, ServerFailedError, ServerOptions
from jaxrl.bridge.shared_memory import SharedMemoryPublisher

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


def fake(directory: Path, mode: str) -> ServerOptions:
    """Options of a server that `fake_vllm.py` stands in for; it describes itself in `about`."""
    script = Path(__file__).with_name("fake_vllm.py")
    text = f'exec {sys.executable} {script} "{mode}" {directory / "about"} "$@"'
    return ServerOptions(python=program(directory / "python", text), dtype="float32")


def alive(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def wait_for(condition) -> None:
    while not condition():  # until pytest's time-out
        time.sleep(0.1)


def test_server_and_workers_end_with_killed_parent(tmp_path: Path) -> None:
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


def test_server_ends_with_its_block(tmp_path: Path) -> None:
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


def test_foreign_program_on_the_port_is_recognised(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        options = ServerOptions(python=tmp_path / "none", dtype="float32", port=port)
        with pytest.raises(ServerFailedError, match=f"127.0.0.1:{port}: .*in use"):
            LocalServer(Path("model"), options, log=tmp_path / "log")


def test_port_of_another_program_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    free = launch.free_port("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr(launch, "_PORTS", [other.getsockname()[1], free])
        monkeypatch.setattr(launch, "_TRIES", 2)
        assert {launch.free_port("127.0.0.1", 0) for _ in range(20)} == {free}


def left_behind(directory: Path) -> list[Path]:
    """Returns what a fake server has made in shared memory and for a while."""
    wait_for((directory / "about").exists)
    about = json.loads((directory / "about").read_text())
    others = [Path(about["socket"]), Path(about["temporary"])]
    return [Path(f"{MEMORY}{name}") for name in about["left"]] + others


@pytest.mark.parametrize("killed", ["learner", "server", "all", "none"])
def test_server_files_are_removed(tmp_path: Path, killed: str) -> None:
    """With its watchdog killed as well, at the next start after the last owner's end. Until then
    the keeper holds the locks: any test beside this one may be that start."""
    options = fake(tmp_path, "has a keeper" if killed == "all" else "answers")
    foreign = shared_memory.SharedMemory(create=True, size=1000)
    command = [sys.executable, "-c", STARTS, str(options.python), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as learner:
        try:
            assert learner.stdout is not None
            watchdog = int(learner.stdout.readline())
            found = left_behind(tmp_path)
            assert all(path.exists() for path in found)
            if killed == "none":
                learner.send_signal(signal.SIGTERM)
            elif killed == "server":
                (server,) = children(watchdog)
                os.kill(server, signal.SIGKILL)
            elif killed == "all":
                processes = [learner.pid, watchdog, *children(watchdog)]
                learner.kill()
                os.killpg(watchdog, signal.SIGKILL)
                wait_for(lambda: not any(map(alive, processes)))
                start_another()
                assert all(path.exists() for path in found)
                keeper = json.loads((tmp_path / "about").read_text())["keeper"]
                os.kill(keeper, signal.SIGKILL)
                wait_for(lambda: not alive(keeper))
                start_another()
            else:
                learner.kill()
            wait_for(lambda: not any(path.exists() for path in found))
        finally:
            learner.kill()
            foreign.close()
    foreign.unlink()  # fails if it is gone


def test_a_late_watchdog_finds_all_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may get no processor for a minute, and is asked last when its server has ended."""
    now = time.time()
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(time=lambda: now))
    monkeypatch.setattr(watchdog, "_mapped", lambda prefix: {segment.stat().st_ino})
    (tmp_path / "owned").mkdir()
    segment, belongings = tmp_path / "psm_new", tmp_path / "owned" / BELONGINGS
    segments = watchdog.Segments(belongings)
    segment.touch()
    now += 60
    segments.record()
    assert belongings.read_text() == f"{segment.stat().st_ino} psm_new\n"


def start_another() -> None:
    """Does what the next server does first."""
    for parent in (MEMORY, Path(tempfile.gettempdir())):
        OwnedDirectory(parent).close()


def children(process: int) -> list[int]:
    return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]


def test_server_without_watchdog_keeps_its_files(tmp_path: Path) -> None:
    with LocalServer(Path("model"), fake(tmp_path, "answers"), log=tmp_path / "log") as server:
        found = left_behind(tmp_path)
        os.kill(server.process_ids[0], signal.SIGKILL)
        start_another()
        assert all(path.exists() for path in found)
    assert not any(path.exists() for path in found)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_ready_means_one_completed_request(tmp_path: Path, host: str) -> None:
    options = dataclasses.replace(fake(tmp_path, "answers"), host=host)
    try:
        server = LocalServer(Path("model"), options, log=tmp_path / "log")
    except ServerFailedError as error:
        pytest.skip(f"{host}: {error}")  # a machine without IPv6
    with server:
        server.wait(lambda seconds: None)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("fails", "fails its first request .*500 .*EngineCore encountered an issue"),
        ("dies", r"(?s)fails its first request .*Unsupported head size 16 for AMX"),
        ("hangs", "fails its first request .*ReadTimeout"),
        ("is silent", "fails its first request .*no token"),
    ],
)
def test_healthy_server_without_completions_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, message: str
) -> None:
    seconds = 3.0 if mode == "hangs" else 100.0
    monkeypatch.setattr("jaxrl.bridge.servers.launch.FIRST_REQUEST", seconds)
    monkeypatch.setattr("jaxrl.bridge.servers.launch._DYING", 1.0)
    with (
        LocalServer(Path("model"), fake(tmp_path, mode), log=tmp_path / "log") as server,
        pytest.raises(ServerFailedError, match=message),
    ):
        server.wait(lambda seconds: None)


def test_every_server_has_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without one in the options. vLLM's own key and frontend would shut jaxrl's out."""
    monkeypatch.setenv("VLLM_API_KEY", "another")
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    keys = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        options = fake(tmp_path / name, "answers")
        with LocalServer(Path("model"), options, log=tmp_path / "log") as server:
            left_behind(tmp_path / name)
            about = json.loads((tmp_path / name / "about").read_text())
            words = Path(f"/proc/{server.process_ids[0]}/cmdline").read_text().split("\0")
        last = max(i for i, word in enumerate(words) if word == "--middleware")
        assert words[last + 1].endswith("auth.RequireKey")  # it sees requests first
        assert server.api_key not in " ".join(words)
        assert about["environment"]["JAXRL_API_KEY"] == server.api_key
        assert not {"VLLM_API_KEY", "VLLM_USE_RUST_FRONTEND"} & about["environment"].keys()
        keys.add(server.api_key)
    assert len(keys) == 2
    assert all(len(key) >= 32 for key in keys)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "a.host", ""])
def test_reachable_server_needs_a_given_key(tmp_path: Path, host: str) -> None:
    reachable = dataclasses.replace(fake(tmp_path, "answers"), host=host)
    with pytest.raises(ValueError, match=f"{re.escape(repr(host))} needs a.*set JAXRL_API_KEY"):
        LocalServer(Path("model"), reachable, log=tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_a_head_that_would_round_its_weights_is_refused(tmp_path: Path) -> None:
    f32, f16 = np.dtype(np.float32), np.dtype(np.float16)
    with pytest.raises(ValueError, match=r"round the head's weights to float16; use logits=f32"):
        SharedMemoryPublisher([], wire=f32, sampler=f32, logits=f16)
    options = ServerOptions(python=tmp_path, dtype="bfloat16", logits="float16")
    with pytest.raises(ValueError, match="round the head's weights"):
        LocalServer(tmp_path, options, log=tmp_path / "log")


@pytest.mark.parametrize(("device", "blocks"), [("cpu", "e4m3"), ("cuda", "int8")])
def test_operands_that_are_not_served_are_refused(
    tmp_path: Path, device: Device, blocks: str
) -> None:
    options = ServerOptions(python=tmp_path, dtype="bfloat16", device=device, blocks=blocks)
    with pytest.raises(ValueError, match=f"blocks={blocks} on device = '{device}': vLLM is"):
        LocalServer(tmp_path, options, log=tmp_path / "log")
