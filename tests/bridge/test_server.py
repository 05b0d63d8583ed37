"""A real server under load: requests in flight, refusals, many publishes, memory."""

import functools
import http.client
import itertools
import os
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl import huggingface
from jaxrl.bridge.base import RefusedError, new_learner
from jaxrl.bridge.in_vllm import auth, lease
from jaxrl.bridge.owned_directory import BELONGINGS, MEMORY
from jaxrl.bridge.servers.control import VllmServer
from jaxrl.bridge.servers.launch import LocalServer, ServerFailedError, ServerOptions
from jaxrl.bridge.shared_memory import SharedMemoryPublisher
from jaxrl.bridge.source import ParamsSource
from jaxrl.models.model import decoder
from tests.bridge.asking import KEY, Output, ask
from tests.bridge.cases import QWEN3, ListSource, params
from tests.bridge.engines import LINUX, VLLM_PYTHON
from tests.bridge.killed_learner import PLACES, kill_in_publish

pytestmark = LINUX
F32 = np.dtype(np.float32)
SPECS = decoder(QWEN3).specs
PROMPT = [5, 6, 7]
LEASE = 8.0
OPTIONS = ServerOptions(
    python=VLLM_PYTHON,
    dtype="float32",
    max_model_len=512,
    kv_cache_bytes=64 << 20,
    api_key=KEY,
    arguments=("--skip-tokenizer-init",),  # the models here have none
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    directory = tmp_path_factory.mktemp("server")
    huggingface.save(directory / "model", params(QWEN3, 0), QWEN3, dtype=F32)
    # oneDNN caches the code of its last 1024 matrix products, some 150 MB here. With a smaller
    # cache, memory levels off early in the leak test.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
        patch.setenv(lease.SECONDS, str(LEASE))
        patch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
        running = LocalServer(directory / "model", OPTIONS, log=directory / "log")
    with running:
        running.wait(lambda seconds: None)
        yield running
        (left,) = MEMORY.glob(f"jaxrl-owned-*/{_socket_of(running)}")
        segments = [line.split()[1] for line in (left.parent / BELONGINGS).read_text().splitlines()]
    print(running.log_tail())
    assert {name.partition("_")[0].partition(".")[0] for name in segments} == {"psm", "sem"}
    assert not left.parent.exists()
    assert not [name for name in segments if (MEMORY / name).exists()]


def _socket_of(server: LocalServer) -> str:
    """Returns the name of a socket that the server's processes listen at."""
    inodes = set[str]()
    for pid in server.process_ids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # one that is open for a moment
                inodes.add(os.readlink(link))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return next(
        Path(line[7]).name
        for line in lines
        if len(line) == 8 and f"socket:[{line[6]}]" in inodes and "jaxrl-owned-" in line[7]
    )


@pytest.fixture
def publisher(server: LocalServer) -> Iterator[SharedMemoryPublisher]:
    with SharedMemoryPublisher([control(server)], wire=F32, sampler=F32) as connected:
        connected.publish(weights(0), version=0)
        yield connected


def control(server: LocalServer) -> VllmServer:
    return VllmServer(server.url, api_key=KEY)


@functools.cache  # a publish that first makes its weights would come too late
def weights(seed: int) -> ParamsSource:
    return ParamsSource(params(QWEN3, seed), SPECS, dtype=F32)


LENGTH = 480
ATTEMPTS = 50  # to publish during a request; a thread that waits for a processor is late


def ask_through(server: LocalServer, publish: Callable[[], None]) -> list[Output]:
    """Sends one request after the other, from before the publish until after it.

    However late a thread wakes on a busy machine, the publish finds the server at work."""
    outputs, first, done = [], threading.Event(), threading.Event()

    def client() -> None:
        while not done.is_set():
            outputs.append(ask(server, PROMPT, LENGTH))
            first.set()

    with ThreadPoolExecutor() as pool:
        asking = pool.submit(client)
        assert first.wait(250)
        try:
            publish()
        finally:
            done.set()
        asking.result()
    return outputs


def test_request_in_flight_continues_with_new_weights(server: LocalServer) -> None:
    """Its tokens come from the old weights before the publish and from the new ones after it."""
    with SharedMemoryPublisher([control(server)], wire=F32, sampler=F32) as publisher:
        for attempt in range(ATTEMPTS):
            old, new = 2 * attempt, 2 * attempt + 1
            publisher.publish(weights(0), version=old)
            publish = functools.partial(publisher.publish, weights(1), version=new)
            outputs = ask_through(server, publish)
            spanning = [output for output in outputs if len(set(output.versions)) == 2]
            if spanning:
                break
        else:
            raise AssertionError("no publish met a request in flight")
    (output,) = spanning
    before = output.versions.count(old)
    assert output.versions == [old] * before + [new] * (LENGTH - before)
    assert set(outputs[0].versions) == {old}
    assert output.tokens[:before] == outputs[0].tokens[:before]
    assert output.logprobs[:before] == outputs[0].logprobs[:before]
    rest = ask(server, PROMPT + output.tokens[:before], LENGTH - before)
    assert output.tokens[before:] == rest.tokens
    assert output.logprobs[before:] == rest.logprobs
    assert set(rest.versions) == {new}


@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_requests_finish_or_abort_before_update(server: LocalServer, in_flight: Any) -> None:
    with SharedMemoryPublisher(
        [control(server)], wire=F32, sampler=F32, in_flight=in_flight
    ) as publisher:
        aborted = False
        for attempt in range(ATTEMPTS):
            publisher.publish(weights(0), version=2 * attempt)
            publish = functools.partial(publisher.publish, weights(1), version=2 * attempt + 1)
            outputs = ask_through(server, publish)
            assert all(len(set(output.versions)) <= 1 for output in outputs)
            for output in outputs:
                assert output.finish_reason == (
                    "length" if len(output.tokens) == LENGTH else "abort"
                )
            aborted |= any(output.finish_reason == "abort" for output in outputs)
            if aborted or in_flight == "wait":
                break
    assert aborted == (in_flight == "abort")


def test_a_refusal_leaves_the_server_serving(
    server: LocalServer, publisher: SharedMemoryPublisher
) -> None:
    outputs = ask(server, PROMPT, 24)
    tensors = dict(weights(1))
    del tensors["model.norm.weight"]
    with pytest.raises(RefusedError, match=r"^bridge refused: .*model\.norm\.weight: missing"):
        publisher.publish(ListSource(tensors), version=1)
    assert ask(server, PROMPT, 24) == outputs
    with pytest.raises(RefusedError, match="computes in float32"):
        SharedMemoryPublisher([control(server)], wire=F32, sampler=np.dtype(np.float16))


@pytest.fixture(scope="module")
def kill(server: LocalServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Kills a learner of this name in the middle of publishing version 7; see `killed_learner`."""
    file = tmp_path_factory.mktemp("weights") / "tensors.npz"
    np.savez(file, **{name: np.asarray(x) for name, x in weights(1)})
    name = new_learner().name
    return lambda place: kill_in_publish(server.url, key=KEY, name=name, tensors=file, place=place)


@pytest.mark.parametrize("place", PLACES)
def test_next_publish_repairs_after_killed_learner(
    server: LocalServer, publisher: SharedMemoryPublisher, kill: Callable[[str], Path], place: str
) -> None:
    expected = ask(server, PROMPT, 24)
    left = kill(place)
    with SharedMemoryPublisher([control(server)], wire=F32, sampler=F32) as resumed:
        assert not left.exists()
        resumed.publish(weights(0), version=0)
        assert ask(server, PROMPT, 24) == expected
        resumed.publish(weights(1), version=1)
        assert set(ask(server, PROMPT, 24).versions) == {1}


def test_expired_lease_resumes_or_reports(
    server: LocalServer, publisher: SharedMemoryPublisher, kill: Callable[[str], Path]
) -> None:
    old, own = ask(server, PROMPT, 24), control(server)
    since = time.monotonic()
    kill("/update_weights")
    assert own._call("GET", "/is_paused")["is_paused"] or time.monotonic() - since > LEASE
    assert own.healthy()
    assert ask(server, PROMPT, 24) == old  # it waits for the lease to run out
    assert own.healthy()
    kill("/start_weight_update")
    with SharedMemoryPublisher([own], wire=F32, sampler=F32) as resumed:
        resumed.publish(weights(0), version=0)
    kill("/finish_weight_update")
    end = time.monotonic() + 10 * LEASE
    while own.healthy():
        assert time.monotonic() < end
        time.sleep(0.1)
    assert control(server)._call("GET", "/is_paused")["is_paused"]
    with SharedMemoryPublisher([own], wire=F32, sampler=F32) as resumed:
        resumed.publish(weights(0), version=0)
    assert own.healthy()
    assert ask(server, PROMPT, 24) == old


def test_a_server_serves_one_learner(server: LocalServer, publisher: SharedMemoryPublisher) -> None:
    old = ask(server, PROMPT, 24)
    second = control(server)
    roles: Any = {"wire": F32, "sampler": F32}
    with pytest.raises(RefusedError, match=r"process.*JAXRL_TAKE_OVER"):
        SharedMemoryPublisher([second], **roles, learner=new_learner("another run"))
    with pytest.raises(RefusedError, match="process"):
        second._call("POST", "/pause?mode=keep&clear_cache=true")
    publisher.publish(weights(0), version=0)
    taker = new_learner("another run", replaces=publisher._learner.name)
    with SharedMemoryPublisher([second], **roles, learner=taker) as other:
        other.publish(weights(1), version=0)
        new = ask(server, PROMPT, 24)
        assert new != old
        for _ in range(2):  # the second time it would connect again
            with pytest.raises(RefusedError, match="another run"):
                publisher.publish(weights(0), version=1)
        assert ask(server, PROMPT, 24) == new
    second.disconnect()


def test_an_update_without_a_pause_is_atomic(server: LocalServer, tmp_path: Path) -> None:
    """Stock vLLM's own update crashes here, because a step runs on a half-loaded model."""
    unpaused = control(server)
    call = unpaused._call

    def resume_at_once(method: str, path: str, body: Any = None) -> Any:
        answer = call(method, path, body)
        if path.startswith("/pause"):
            call("POST", "/resume")
        return answer

    unpaused._call = resume_at_once
    with (
        SharedMemoryPublisher([unpaused], wire=F32, sampler=F32) as publisher,
        ThreadPoolExecutor() as pool,
    ):
        flying = [pool.submit(ask, server, PROMPT, LENGTH) for _ in range(4)]
        for version in range(4):
            publisher.publish(weights(version), version=version)
        assert all(len(output.result().tokens) == LENGTH for output in flying)
    assert unpaused.healthy()


def resident(server: LocalServer) -> int:
    """Returns the private memory of the server's processes, in bytes."""
    total = 0
    for pid in server.process_ids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Private_Clean:", "Private_Dirty:")):
                total += int(line.split()[1]) << 10
    return total


def test_fifty_publishes_under_load(server: LocalServer, publisher: SharedMemoryPublisher) -> None:
    sources = [weights(0), weights(1)]
    expected = []
    for version, source in enumerate(sources, start=1):
        publisher.publish(source, version=version)
        expected.append(ask(server, PROMPT, 24))
    done, streams = threading.Event(), [list[Output]() for _ in range(4)]

    def client(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not done.is_set():
            streams[seed].append(ask(server, rng.integers(2, 128, 8).tolist(), 48))

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(client, seed) for seed in range(4)]
        try:
            for version in range(3, 53):
                publisher.publish(sources[version % 2], version=version)
                # However late a thread wakes, each gets answers of at least every fourth version.
                while not all(some and some[-1].versions[-1] > version - 4 for some in streams):
                    assert not any(client.done() for client in running)
                    time.sleep(0.01)
        finally:
            done.set()
        assert all(client.result() is None for client in running)
    for outputs in streams:
        assert all(len(a.tokens) == len(a.versions) == 48 for a in outputs)
        assert all(a.finish_reason == "length" for a in outputs)
        versions = list(itertools.chain.from_iterable(a.versions for a in outputs))
        assert versions == sorted(versions)
        assert len(set(versions)) > 10
        assert np.isfinite([a.logprobs for a in outputs]).all()
    final = ask(server, PROMPT, 24)
    assert final._replace(versions=[]) == expected[52 % 2]._replace(versions=[])
    assert set(final.versions) == {52}


def test_waiting_processes_use_no_core(server: LocalServer) -> None:
    """vLLM's own would compute in vain for a second after each message, on a core each."""

    def computed() -> float:
        lines = [Path(f"/proc/{pid}/stat").read_text() for pid in server.process_ids]
        ticks = [line.rpartition(")")[2].split()[11:13] for line in lines]  # user's and system's
        return sum(int(x) for pair in ticks for x in pair) / os.sysconf("SC_CLK_TCK")

    ask(server, PROMPT, 4)
    before, since = computed(), time.monotonic()
    time.sleep(0.5)
    assert computed() - before < (time.monotonic() - since) / 2


def test_publishing_leaks_no_memory(server: LocalServer, publisher: SharedMemoryPublisher) -> None:
    """Leaking a copy of the weights would add 11 MB per publish. Requests run one by one, so that
    vLLM's caches per batch size do not grow."""
    sources, memory = [weights(0), weights(1)], []
    for version in range(1, 51):
        publisher.publish(sources[version % 2], version=version)
        ask(server, PROMPT, 24)
        memory.append(resident(server))
    assert memory[-1] - memory[19] < 4 << 20


@pytest.mark.parametrize("key", [None, "another key"])
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/inference/v1/generate"),
        ("POST", "/v1/completions"),
        ("POST", "/update_weights"),
        ("POST", "/init_weight_transfer_engine"),
        ("POST", "/pause"),
        ("POST", "/collective_rpc"),
        ("GET", "/server_info"),
        ("GET", "/none"),
    ],
)
def test_requests_without_the_key_are_rejected(
    server: LocalServer, method: str, path: str, key: str | None
) -> None:
    before = control(server).weight_version()
    address = urllib.parse.urlsplit(server.url).netloc
    with closing(http.client.HTTPConnection(address, timeout=250)) as connection:
        connection.request(method, path, "{}", auth.headers(key))
        response = connection.getresponse()
        assert (response.status, b"JAXRL_API_KEY" in response.read()) == (401, True)
    stranger = VllmServer(server.url, api_key=key)
    assert stranger.healthy()
    assert KEY not in " ".join(_command_line(server))
    assert control(server).weight_version() == before


@pytest.mark.parametrize("origin", ["http://evil.example", "http://localhost:3000", "null"])
def test_web_pages_cannot_pause_a_server(server: LocalServer, origin: str) -> None:
    address = urllib.parse.urlsplit(server.url).netloc
    for headers in ({"Origin": origin}, {"Origin": origin, **auth.headers(KEY)}):
        with closing(http.client.HTTPConnection(address, timeout=250)) as connection:
            connection.request("POST", "/pause?mode=keep", headers=headers)
            assert connection.getresponse().status == 403
    assert ask(server, PROMPT, 4).finish_reason == "length"


def _command_line(server: LocalServer) -> list[str]:
    lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in server.process_ids]
    return [word for line in lines for word in line.split("\0")]


def test_a_server_that_cannot_start_shows_why(tmp_path: Path) -> None:
    with (
        LocalServer(tmp_path / "none", OPTIONS, log=tmp_path / "log") as broken,
        pytest.raises(ServerFailedError, match="none"),
    ):
        broken.wait(lambda seconds: None)
