"""A real server that sleeps while the learner trains. It loses its weights: the tests zero them,
because vLLM's CPU build only changes its state."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from jaxrl import train
from jaxrl.bridge import PoisonedError, VllmServer, known_key
from jaxrl.bridge.in_vllm import lease
from jaxrl.builders.sampler import Serving
from jaxrl.builders.servers import starting_server
from jaxrl.builders.weight_sync import run_learner
from jaxrl.huggingface.checkpoint import Checkpoint
from jaxrl.models.model import decoder
from jaxrl.sampling.base import SamplingParams
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from tests import tiny
from tests.sampling.serving import FP32, SERVED, Material, config, opened, write_material

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build is for Linux")
PROMPTS = [np.array(p, np.int32) for p in ([5, 6, 7], [9], [30, 31, 32, 33, 34, 35])]
GREEDY = SamplingParams(max_tokens=12, temperature=0)
LEASE = 8.0
EXTENSION = ["--worker-extension-cls", "tests.sampling.zeroing.Zeroing"]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Material]:
    directory = tmp_path_factory.mktemp("asleep")
    write_material(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(lease.SECONDS, str(LEASE))
        starting = starting_server(
            config(directory, sampler__vllm_args=json.dumps(EXTENSION)).sampler,
            Checkpoint(directory / "model"),
            dtype=FP32.sampler,
            log=directory / "vllm.log",
            note=print,
        )
        with starting as server:
            yield Material(server.wait().url, directory)


@pytest.fixture
def serving(material: Material, asked: list[str]) -> Iterator[Serving]:
    with opened(material, [material.url], note=print, sampler__sleep="true") as made:
        asked.clear()
        yield made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects the requests to the server; one that falls asleep loses its weights."""
    seen, send = list[str](), VllmServer._send

    def watching(self: VllmServer, method: str, path: str, *args, **options):
        seen.append(path)
        answer = send(self, method, path, *args, **options)
        if path.startswith("/sleep"):
            self._call("POST", "/collective_rpc", {"method": "zero_weights"})
            seen.pop()
        return answer

    monkeypatch.setattr(VllmServer, "_send", watching)
    return seen


def control(material: Material) -> VllmServer:
    return VllmServer(material.url, api_key=known_key())


def sample(sampler) -> list:
    found = sampler.sample(PROMPTS, GREEDY, group_size=1)
    return sorted(found, key=lambda one: one.prompt_index)


def check_serves(serving: Serving, seed: int, *, version: int) -> None:
    """Compares completions with those of the weights of this seed."""
    embedded = EmbeddedSampler(decoder(SERVED), tiny.params(seed, config=SERVED), precision=FP32)
    for ours, theirs in zip(sample(embedded), sample(serving.sampler), strict=True):
        assert theirs.tokens.tolist() == ours.tokens.tolist()
        np.testing.assert_allclose(theirs.logprobs, ours.logprobs, atol=2e-5)
        assert set(theirs.versions) == {version}


def test_a_publish_wakes_the_server(material, serving, asked) -> None:
    check_serves(serving, 0, version=0)
    server = control(material)
    serving.sleep()
    assert server._call("GET", "/is_sleeping")["is_sleeping"]
    time.sleep(LEASE + 1)  # a step takes longer than the lease
    assert server.healthy()
    asked.clear()
    numbers = serving.publish(tiny.params(1, config=SERVED), version=1)
    assert asked == [
        "/wake_up?tags=weights",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/wake_up?tags=kv_cache",
        "/resume",
    ]
    assert numbers["time/publish/pause"] > 0
    assert not server._call("GET", "/is_sleeping")["is_sleeping"]
    check_serves(serving, 1, version=1)
    serving.publish(tiny.params(2, config=SERVED), version=2)  # of a server that is awake
    check_serves(serving, 2, version=2)


def test_zeroed_weights_are_seen(material, serving) -> None:
    control(material)._call("POST", "/collective_rpc", {"method": "zero_weights"})
    (one, *_) = sample(serving.sampler)
    np.testing.assert_allclose(one.logprobs, -np.log(SERVED.vocab_size), rtol=1e-5)
    serving.publish(tiny.params(0, config=SERVED), version=1)
    check_serves(serving, 0, version=1)


def test_without_weights_the_server_stays_asleep(material, serving, monkeypatch) -> None:
    serving.sleep()
    with monkeypatch.context() as patch:
        load = VllmServer._load
        patch.setattr(
            VllmServer, "_load", lambda self, info: load(self, info | {"payload": "none"})
        )
        with pytest.raises(PoisonedError, match=r"has lost its weights.*refused.*none"):
            serving.publish(tiny.params(1, config=SERVED), version=1)
    assert control(material)._call("GET", "/is_sleeping")["is_sleeping"]
    serving.publish(tiny.params(1, config=SERVED), version=1)
    check_serves(serving, 1, version=1)


_DYING = """
import os, sys
from jaxrl.bridge.base import LearnerIdentity
from jaxrl.bridge.servers.control import VllmServer
url, key, name, session, root = sys.argv[1:]
server = VllmServer(url, api_key=key, sleeps=True)
server.connect(root=root, wire="float32", sampler="float32", logits="float32",
               learner=LearnerIdentity(name, session))
server.sleep(in_flight="keep")
server._call("POST", "/collective_rpc", {"method": "zero_weights"})
print("asleep", flush=True)
sys.stdin.read()
"""


def test_a_learner_that_dies_asleep(material, tmp_path, asked) -> None:
    from jaxrl.bridge import known_key

    server, learner = control(material), run_learner(material.directory)
    arguments = [material.url, known_key(), learner.name, learner.session, str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-c", _DYING, *arguments], stdin=-1, stdout=subprocess.PIPE, text=True
    ) as dying:
        assert dying.stdout is not None
        assert dying.stdout.readline() == "asleep\n"
        time.sleep(LEASE + 1)
        assert server.healthy()
        dying.kill()
    end = time.monotonic() + 10 * LEASE
    while server.healthy():
        assert time.monotonic() < end
        time.sleep(0.1)
    with opened(material, [material.url], note=print, sampler__sleep="true") as resumed:
        assert server.healthy()
        check_serves(resumed, 0, version=0)


def test_a_run_with_a_sleeping_server_computes_the_same(material, tmp_path, asked) -> None:
    def run(name: str, **changes: str) -> bytes:
        shared = {"sampler__url": material.url, "run_dir": str(tmp_path / name)}
        done = train.train(config(material.directory, **shared, **changes))
        assert done.model is not None
        return (done.model / "model.safetensors").read_bytes()

    awake = run("awake")
    assert "/wake_up?tags=weights" not in asked
    asked.clear()
    assert run("asleep", sampler__sleep="true") == awake
    slept = [path for path in asked if path.startswith(("/sleep", "/resume"))]
    assert [path[:6] for path in slept] == ["/resum", *["/sleep", "/resum"] * 2]
