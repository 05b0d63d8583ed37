"""A real server behind an agent: exact after every publish, whole and as differences."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxrl import huggingface
from jaxrl.bridge.base import RefusedError, new_learner
from jaxrl.bridge.in_vllm import relay
from jaxrl.bridge.servers.control import VllmServer
from jaxrl.bridge.servers.launch import LocalServer, ServerOptions
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
        arguments=("--skip-tokenizer-init",),  # the models here have none
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
    until = time.monotonic() + 10  # the agent tidies up after it has answered
    while (left := list(agent.directory.glob("payloads/*"))) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
