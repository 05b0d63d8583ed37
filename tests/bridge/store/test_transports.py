"""The same publishes through a bucket, a web server and a directory, over links that fail."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from jaxrl.bridge.base import UnavailableError, new_learner
from jaxrl.bridge.in_vllm import relay
from jaxrl.bridge.servers.launch import free_port
from jaxrl.bridge.store.objects import Objects, Store, StoreError
from jaxrl.bridge.store.process import AgentProcess
from tests.bridge.asking import KEY
from tests.bridge.cases import ListSource
from tests.bridge.store.hosts import RelayedRecorder, host
from tests.bridge.store.test_store import check, publisher, weights

sys.path.append(str(Path(__file__).parents[3] / "scripts"))
from benchmarks.link import Link
from benchmarks.web_store import wait_for, web_store

NGINX = pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx")
MOTO = pytest.mark.skipif(shutil.which("moto_server") is None, reason="needs moto's moto_server")


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Runs nginx with the documented config; its port."""
    with web_store(tmp_path / "store", key=KEY) as port:
        yield port


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs moto's S3 server; a bucket in it."""
    port = free_port("127.0.0.1", 0)
    out = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(["moto_server", "-p", str(port)], start_new_session=True, **out) as moto:
        try:
            wait_for(port, moto)
            for name, value in {
                "AWS_ENDPOINT": f"http://127.0.0.1:{port}",
                "AWS_ALLOW_HTTP": "true",
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "someone",
                "AWS_SECRET_ACCESS_KEY": "something",
            }.items():
                monkeypatch.setenv(name, value)
            Objects(Store(f"http://127.0.0.1:{port}", None)).put("a-bucket", b"")
            yield "s3://a-bucket/some/path"
        finally:
            os.killpg(moto.pid, signal.SIGKILL)


def publish_some(url: str, tmp_path: Path) -> None:
    """Publishes to two hosts, one of which joins later; checks every version."""
    (early,), (late,) = host(tmp_path / "a", key=KEY), host(tmp_path / "b", key=KEY)
    late.failure = UnavailableError("not yet")
    with publisher([early, late], url) as learner:
        for number, changed in enumerate((1.0, 0.2, 0.01, 0.0)):
            if number == 2:
                late.failure = None
            tensors = weights(number, changed=changed)
            learner.publish(ListSource(tensors), version=number)
            for server in (early, late)[: number or 1]:
                if server.failure is None:
                    check(server, tensors)
    assert late.whole == 1


@MOTO
def test_through_a_bucket(bucket: str, tmp_path: Path) -> None:
    publish_some(bucket, tmp_path)
    assert Objects(Store(bucket, None)).names() == []


@NGINX
def test_through_a_web_server(port: int, tmp_path: Path) -> None:
    publish_some(f"http://127.0.0.1:{port}/some/path", tmp_path)
    assert not [path for path in (tmp_path / "store/objects").rglob("*") if path.is_file()]
    with pytest.raises(StoreError, match="/name: "):
        Objects(Store(f"http://127.0.0.1:{port}", "another key")).put("name", b"")


def damage(seed: int) -> Callable[[bytes], bytes | None]:
    """Returns what cuts one block in 40 and flips a byte in another."""
    rng = random.Random(seed)

    def damaged(block: bytes) -> bytes | None:
        what = rng.randrange(40) if len(block) > 4096 else 2
        if what == 1:
            at = rng.randrange(2048, len(block))
            block = block[:at] + bytes([block[at] ^ 64]) + block[at + 1 :]
        return block if what else None

    return damaged


@NGINX
def test_unreliable_link(port: int, tmp_path: Path) -> None:
    """Exact after every publish; a host that gave up has the next version."""
    servers = [*host(tmp_path / "a", key=KEY), *host(tmp_path / "b", key=KEY)]
    with (
        Link(port, bandwidth=100e6 / 8, delay=0.005, damage=damage(0)) as link,
        publisher(servers, f"http://127.0.0.1:{link.port}") as learner,
    ):
        for number in range(5):
            tensors = weights(number, changed=0.2)
            learner.publish(ListSource(tensors), version=number)
            current = [server for server in servers if server.version == number]
            assert current
            for server in current:
                check(server, tensors)


@NGINX
def test_missing_store_is_named(port: int, tmp_path: Path) -> None:
    with Link(port) as link:
        url = f"http://127.0.0.1:{link.port}/path"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrl.bridge.store.clients._WRITE", (1,))
        learner = publisher(host(tmp_path / "a", key=KEY), url)
        with pytest.raises(UnavailableError, match=f"{link.port}/path/jaxrl-.*/chunks/"):
            learner.publish(ListSource({"a": np.zeros(3, np.float16)}), version=0)


def answers(agent: AgentProcess, *, but: int) -> bool:
    """Tells whether a new process of the agent listens."""
    with socket.socket(socket.AF_UNIX) as one, contextlib.suppress(OSError):
        one.connect(str(agent.directory / relay.SOCKET))
        return agent.process_id != but
    return False


def test_agents_killed_at_random(tmp_path: Path) -> None:
    """Three hosts with two servers each; every server has every version."""
    done = threading.Event()
    with ExitStack() as stack:
        agents = [stack.enter_context(AgentProcess(key=KEY, note=print)) for _ in range(3)]
        servers = [RelayedRecorder(a.directory, port=i) for a in agents for i in range(2)]
        rng = random.Random(0)

        def kill() -> None:
            """Kills one or two at a time; the third host can take the version."""
            while not done.wait(rng.uniform(0, 0.7)):
                killed = rng.sample(agents, rng.randint(1, 2))
                before = [agent.process_id for agent in killed]
                for process_id in before:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process_id, signal.SIGKILL)
                for agent, process_id in zip(killed, before, strict=True):
                    while not done.is_set() and not answers(agent, but=process_id):
                        time.sleep(0.02)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            with publisher(servers, (tmp_path / "store").as_uri()) as learner:
                for number in range(6):
                    tensors = weights(number, changed=0.1)
                    learner.publish(ListSource(tensors), version=number)
                    for server in servers:
                        if server.version == number:
                            check(server, tensors)
                    assert any(server.version == number for server in servers)
        finally:
            done.set()
            killer.join()
        with publisher(servers, (tmp_path / "store").as_uri()) as learner:
            learner.publish(ListSource(weights(99)), version=99)
            for server in servers:
                check(server, weights(99))


KILLED = """
import os, signal, sys, threading
import numpy as np
from pathlib import Path
from jaxrl.bridge.base import new_learner
from tests.bridge.cases import ListSource
from tests.bridge.store.hosts import RelayedRecorder
from tests.bridge.store.test_store import publisher, weights

directory, url, seconds, first = sys.argv[1:]
learner = publisher([RelayedRecorder(Path(directory))], url, learner=new_learner("a run"))
learner.publish(ListSource(weights(int(first), changed=0.1)), version=int(first))
threading.Timer(float(seconds), os.kill, [os.getpid(), signal.SIGKILL]).start()
for number in range(int(first) + 1, 10**6):
    learner.publish(ListSource(weights(number, changed=0.1)), version=number)
"""


def test_learners_killed_at_random(tmp_path: Path) -> None:
    """What they leave in the store goes with the next one, which every host follows at once."""
    url, rng = (tmp_path / "store").as_uri(), random.Random(0)
    with AgentProcess(key=KEY, note=print) as agent:
        for attempt in range(2):
            arguments = [str(agent.directory), url, str(rng.uniform(0, 0.6)), str(10 * attempt)]
            command = [sys.executable, "-c", KILLED, *arguments]
            assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        server = RelayedRecorder(agent.directory)
        with publisher([server], url, learner=new_learner("a run")) as learner:
            assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
            learner.publish(ListSource(weights(1)), version=0)
            check(server, weights(1))
        assert len(list(agent.directory.glob("payloads/*"))) == 1
