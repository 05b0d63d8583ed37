"""A real server behind an agent: exact after every publish, whole and as differences.

With JAXRL_TENSOR_PARALLEL=2 it has a worker for each half of the weights.
"""

import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxrl import huggingface
from jaxrl.bridge.base import PoisonedError, RefusedError, UnavailableError, new_learner
from jaxrl.bridge.in_vllm import relay
from jaxrl.bridge.servers.control import VllmServer
from jaxrl.bridge.servers.launch import LocalServer, ServerFailedError, ServerOptions
from jaxrl.bridge.source import ParamsSource
from jaxrl.bridge.store.objects import Store
from jaxrl.bridge.store.process import AgentProcess
from jaxrl.bridge.store.publisher import StorePublisher
from jaxrl.models.model import decoder
from tests.bridge.asking import KEY, ask
from tests.bridge.cases import QWEN3, params
from tests.bridge.engines import LINUX, VLLM_PYTHON

pytestmark = LINUX
F32 = np.dtype(np.float32)
PROMPT = [5, 6, 7]
SHARDS = int(os.environ.get("JAXRL_TENSOR_PARALLEL", "1"))


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    with AgentProcess(key=KEY, note=print) as running:
        yield running


@pytest.fixture(scope="module")
def server(agent: AgentProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Runs a server that starts with the weights of seed 1."""
    directory = tmp_path_factory.mktemp("server")
    huggingface.save(directory / "model", params(QWEN3, 1), QWEN3, dtype=F32)
    options = ServerOptions(
        python=VLLM_PYTHON,
        dtype="float32",
        max_model_len=512,
        kv_cache_bytes=64 << 20,
        agent=agent.directory,
        api_key=KEY,
        # The models here have no tokenizer.
        arguments=("--skip-tokenizer-init", f"--tensor-parallel-size={SHARDS}"),
    )
    with LocalServer(directory / "model", options, log=directory / "log") as running:
        running.wait(lambda seconds: None)
        yield running


def weights(seed: int) -> ParamsSource:
    return ParamsSource(params(QWEN3, seed), decoder(QWEN3).specs, dtype=F32)


def publisher(server: VllmServer, url: str) -> StorePublisher:
    return StorePublisher(
        [server], Store(url, KEY), wire=F32, sampler=F32, learner=new_learner("a run")
    )


def test_outputs_equal_those_of_a_fresh_start(
    server: LocalServer, agent: AgentProcess, tmp_path: Path
) -> None:
    fresh, url = ask(server, PROMPT, 48), (tmp_path / "store").as_uri()
    own = VllmServer(server.url, api_key=KEY)
    with publisher(own, url) as learner:
        learner.publish(weights(0), version=1)
        other = ask(server, PROMPT, 48)
        assert other.tokens != fresh.tokens
        for version, seed in enumerate((1, 0, 1), start=2):
            if seed == 0:
                os.kill(agent.process_id, signal.SIGKILL)
            timings = learner.publish(weights(seed), version=version)
            assert timings.fetch > 0
            output = ask(server, PROMPT, 48)
            assert set(output.versions) == {version}
            assert output._replace(versions=[]) == (fresh if seed else other)._replace(versions=[])
        assert list((tmp_path / "store").rglob("deltas/*"))
        stranger = VllmServer(server.url, api_key=KEY)
        with pytest.raises(RefusedError, match="takes weights from learner 'a run'"):
            stranger._call("POST", relay.PATH, {})
        assert list(agent.directory.glob("payloads/*"))
    own.disconnect()
    until = time.monotonic() + 250  # the agent tidies up after it has answered
    while (left := list(agent.directory.glob("payloads/*"))) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left


CUT = pytest.mark.skipif(SHARDS == 1, reason="one process; set JAXRL_TENSOR_PARALLEL=2")


def last_worker(server: LocalServer) -> int:
    title = f"Worker_TP{SHARDS - 1}".encode()
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.process_ids}
    return next(pid for pid, command in commands.items() if title in command)


@CUT
def test_a_refusal_is_not_repeated(server: LocalServer, tmp_path: Path) -> None:
    """Stock vLLM takes the other workers' refusals for answers to the next call."""
    url = (tmp_path / "store").as_uri()
    with publisher(VllmServer(server.url, api_key=KEY), url) as learner:
        learner.publish(weights(1), version=1)
        for _ in range(2):
            with pytest.raises(RefusedError, match="takes weights from learner 'a run'"):
                StorePublisher(
                    [VllmServer(server.url, api_key=KEY)],
                    Store(url, KEY),
                    wire=F32,
                    sampler=F32,
                    learner=new_learner("another run"),
                )
            learner.publish(weights(0), version=2)


@CUT
def test_workers_refuse_together(server: LocalServer, tmp_path: Path) -> None:
    """One of them can open no file, and the other must not load its half alone."""
    with publisher(VllmServer(server.url, api_key=KEY), (tmp_path / "store").as_uri()) as learner:
        learner.publish(weights(1), version=1)
        before, worker = ask(server, PROMPT, 48), last_worker(server)
        old = resource.prlimit(worker, resource.RLIMIT_NOFILE)
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (3, old[1]))
        try:
            with pytest.raises(RefusedError, match="Too many open files"):
                learner.publish(weights(0), version=2)
        finally:
            resource.prlimit(worker, resource.RLIMIT_NOFILE, old)
        assert ask(server, PROMPT, 48) == before
        learner.publish(weights(0), version=3)
        learner.publish(weights(1), version=4)
        after = ask(server, PROMPT, 48)
        assert after._replace(versions=[]) == before._replace(versions=[])
        assert set(after.versions) == {4}


def dies_within(seconds: float, server: LocalServer) -> bool:
    """Tells if the server ends in time, as `jaxrl serve` notices."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            server.check()
        except ServerFailedError:
            return True
        time.sleep(0.1)
    return False


@CUT
def test_killed_worker_is_noticed(server: LocalServer, tmp_path: Path) -> None:
    """The last test: its half of the weights is gone, and no publish succeeds without it."""
    own = VllmServer(server.url, api_key=KEY, timeout=60.0)
    with publisher(own, (tmp_path / "store").as_uri()) as learner:
        learner.publish(weights(1), version=1)
        os.kill(last_worker(server), signal.SIGKILL)
        for version in (2, 3):
            with pytest.raises((UnavailableError, PoisonedError)):
                learner.publish(weights(0), version=version)
            assert not own.connected
    assert dies_within(60, server)
