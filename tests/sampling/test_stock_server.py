"""A vLLM server without jaxrl's plugin: adapters by its own routes, its base and head checked."""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl import huggingface, train
from jaxrl.bridge.base import RefusedError, UnavailableError
from jaxrl.bridge.servers.control import VllmServer
from jaxrl.bridge.servers.routes import ControlError
from jaxrl.bridge.servers.stock import StockServer
from jaxrl.builders.layout import make_layout
from jaxrl.builders.model import load_trained
from jaxrl.builders.stock_servers import all_stock, check_head, make_base_check, rounds_logits
from jaxrl.builders.weight_sync import WeightRoute
from jaxrl.core.casts import cast
from jaxrl.core.precision import Precision, parse, short_name
from jaxrl.huggingface.checkpoint import Checkpoint
from jaxrl.models import lora
from jaxrl.models.model import decoder
from jaxrl.sampling.base import Completion, SamplingParams
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from jaxrl.sampling.vllm.stock import StockSampler
from jaxrl.tracking.tracker import read_metrics
from tests import tiny
from tests.sampling.serving import (
    FP32,
    MODEL,
    SERVED,
    Material,
    config,
    opened,
    stock_server,
    write_material,
)
from tests.sampling.standin import Server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU build is for Linux")
ADAPTERS = {"lora__rank": "4", "lora__publish": "adapters"}
PROMPTS = [np.array(p, np.int32) for p in ([5, 6, 7], [9], [30, 31, 32])]
PLAIN = SamplingParams(max_tokens=16, temperature=0)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Material]:
    directory = tmp_path_factory.mktemp("stock")
    write_material(directory)
    model, lora_keys = directory / "model", ["--enable-lora", "--max-lora-rank", "8"]
    with stock_server(model, *lora_keys, "--logprobs-mode", "processed_logprobs") as url:
        yield Material(url, directory)


def adapter_names(material: Material) -> list[str]:
    return StockServer(material.url).adapter_names("jaxrl-")


def sample(sampler) -> list[Completion]:
    found = sampler.sample(PROMPTS, PLAIN, group_size=1)
    return sorted(found, key=lambda c: c.prompt_index)


def greedy(serving) -> list[list[int]]:
    return [c.tokens.tolist() for c in sample(serving.sampler)]


def trained(seed: int, params: lora.Adapted) -> lora.Adapted:
    """Returns adapters that change the model's outputs."""
    keys = iter(jax.random.split(jax.random.key(seed), 100))
    draw = lambda x: 0.3 * jax.random.normal(next(keys), x.shape, x.dtype)  # noqa: E731
    return dataclasses.replace(params, adapters=jax.tree.map(draw, params.adapters))


def test_run_trains_adapters_on_it(material: Material, tmp_path: Path) -> None:
    changes = {"run_dir": str(tmp_path / "run"), "rollouts__max_staleness": "1"}
    done = train.train(
        config(
            material.directory, sampler__url=material.url, train__steps="3", **ADAPTERS, **changes
        )
    )
    assert done.step == 3
    rows = [e for e in read_metrics(tmp_path / "run/metrics.jsonl") if "reward" in e]
    assert [row["sampler/servers"] for row in rows] == [1.0] * 3
    assert abs(rows[0]["kl"]) < 1e-6  # no step has changed the policy since it was sampled
    assert max(row["staleness"] for row in rows) <= 1
    assert adapter_names(material) == []  # all are unloaded at the end


def test_each_version_is_the_learners(material: Material) -> None:
    """Greedy tokens of the embedded sampler; requests that began before a publish keep theirs."""
    model = decoder(SERVED)
    with opened(material, [material.url], note=print, **ADAPTERS) as serving:
        _, start, _ = loaded(material)
        old = greedy(serving)
        begun = serving.sampler.sample(PROMPTS, PLAIN, group_size=1)  # with version 0
        for version in (1, 2):
            params = trained(version, start)
            serving.publish(params, version=version)
            merged = EmbeddedSampler(model, lora.merge(params), precision=FP32)
            for theirs, ours in zip(sample(serving.sampler), sample(merged), strict=True):
                assert theirs.tokens.tolist() == ours.tokens.tolist()
                assert set(theirs.versions) == {version}
                np.testing.assert_allclose(theirs.logprobs, ours.logprobs, atol=5e-5)
            if version == 1:
                late = sorted(begun, key=lambda c: c.prompt_index)
                assert [c.tokens.tolist() for c in late] == old
                assert {int(v) for c in late for v in c.versions} == {0}
        assert len(adapter_names(material)) == 2


@functools.cache
def loaded(material: Material):
    made = config(material.directory, **ADAPTERS)
    checkpoint = Checkpoint(material.directory / "model")
    return load_trained(made, checkpoint, layout=make_layout(made.mesh))


def test_whole_weights_are_refused(material: Material) -> None:
    assert VllmServer(material.url).is_stock()
    assert VllmServer("http://127.0.0.1:1").is_stock() is None
    with (
        pytest.raises(ValueError, match=r"takes no weights; start it with jaxrl serve"),
        opened(material, [material.url], note=print),
    ):
        pass


def test_server_with_another_base_is_refused(material: Material, tmp_path: Path) -> None:
    """The learner's weights differ by a hundredth, more than the roundings of f32."""
    write_material(tmp_path)
    nearly = jax.tree.map(lambda x: x * 1.01, tiny.params(config=SERVED))
    huggingface.save(tmp_path / "model", nearly, SERVED, dtype=FP32.wire)
    other = Material(material.url, tmp_path)
    with (
        pytest.raises(RefusedError, match=r"another base model than .*/model, or another dtype"),
        opened(other, [material.url], note=print, **ADAPTERS),
    ):
        pass
    assert adapter_names(material) == []


def damages(directory: Path) -> Iterator[Callable[[], None]]:
    tensors, settings = directory / "adapter_model.safetensors", directory / "adapter_config.json"
    yield tensors.unlink
    yield settings.unlink
    yield lambda: tensors.write_bytes(b"")
    yield lambda: tensors.write_bytes(tensors.read_bytes()[:-9])
    yield lambda: tensors.write_bytes(b"\xff" + tensors.read_bytes()[1:])
    yield lambda: settings.write_text("{")


def test_damaged_adapters_are_refused(material: Material, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old adapter goes on, and the next publish is complete."""
    load = VllmServer.load_adapter
    with opened(material, [material.url], note=print, **ADAPTERS) as serving:
        _, start, _ = loaded(material)
        serving.publish(trained(1, start), version=1)
        before, names = greedy(serving), adapter_names(material)
        for number in range(6):

            def damaged(server: VllmServer, name: str, directory: Path, number=number) -> None:
                list(damages(directory))[number]()
                load(server, name, directory)

            monkeypatch.setattr(VllmServer, "load_adapter", damaged)
            with pytest.raises(RefusedError, match=r"sampler\.store"):
                serving.publish(trained(2, start), version=2 + number)
            assert greedy(serving) == before
            assert adapter_names(material) == names
        monkeypatch.undo()
        serving.publish(trained(2, start), version=9)
        assert greedy(serving) != before


def test_adapters_of_killed_learners_go(material: Material) -> None:
    """Two runs may use the server at the same time; a run's earlier processes leave nothing."""
    with opened(material, [material.url], note=print, **ADAPTERS) as serving:
        (server,) = serving.publish._servers
        publisher = serving.publish._send.publish.__self__
        (own,) = adapter_names(material)
        earlier = publisher._run + "another-session-7"
        for name in (earlier, "jaxrl-another-run-7"):
            server.load_adapter(name, publisher._root / own)
        with opened(material, [material.url], note=print, **ADAPTERS) as again:
            assert earlier not in adapter_names(material)
            assert "jaxrl-another-run-7" in adapter_names(material)
            greedy(again)
    server.connected = True
    server.unload_adapter("jaxrl-another-run-7")


def respond(body: dict, logprob: float) -> tuple[int, str]:
    choice = {
        "token_ids": [3],
        "logprobs": {"token_logprobs": [logprob]},
        "finish_reason": "length",
    }
    choices = [choice | {"index": i} for i in range(body["n"])]
    return 200, json.dumps({"choices": choices})


@pytest.fixture
def client(server: Server) -> Iterator[StockSampler]:
    made = StockSampler([server.url], max_positions=32, vocab_size=8)
    made.use_version(3, urls=[server.url], adapter="one")
    yield made
    made.close()


def test_requests_ask_for_what_every_server_takes(server: Server, client: StockSampler) -> None:
    server.reply = lambda body: respond(body, -0.5)
    found = list(client.sample([np.array([1, 2])], SamplingParams(max_tokens=1), group_size=2))
    assert [(c.tokens.tolist(), c.logprobs.tolist()) for c in found] == [([3], [-0.5])] * 2
    assert {int(v) for c in found for v in c.versions} == {3}
    (body,) = server.bodies
    assert body["model"] == "one"
    assert body["logprobs"] == 1
    assert not body.keys() & {"seed", "min_p", "prompt_logprobs"}
    with pytest.raises(ValueError, match=r"sampling\.min_p = 0\.1"):
        client.sample([np.array([1])], SamplingParams(max_tokens=1, min_p=0.1), group_size=1)


def test_logprobs_before_temperature_are_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.reply = lambda body: respond(body, -0.5)
    monkeypatch.setattr(StockServer, "models", lambda *_, **__: [{"id": "base", "parent": None}])
    directory = tmp_path / "model"
    tiny.write_checkpoint(directory, config=SERVED)
    params = lora.Adapted({}, tiny.params(config=SERVED), 1.0)
    route = WeightRoute(decoder(SERVED), params, 0, FP32, Checkpoint(directory))
    check = make_base_check(
        route,
        layout=make_layout(config(tmp_path).mesh),
        client=functools.partial(StockSampler, max_positions=32, vocab_size=64),
    )
    stock = StockServer(server.url)
    with pytest.raises(RefusedError, match="--logprobs-mode processed_logprobs"):
        check([stock], params.frozen, 0)
    assert not stock.connected
    assert server.bodies[-1]["model"] == "base"


def test_restart_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have another base, so the check is due again; so is any that does not answer."""
    held, server = [{"id": "base", "parent": None}], StockServer("http://127.0.0.1:1")

    def call(method: str, path: str, body=None, *, timeout=None):
        if not held:
            raise ControlError("refused")
        if path == "/v1/load_lora_adapter":
            held.append({"id": body["lora_name"], "parent": "base"})
        return {"data": held, "version": "0.32.0"}

    monkeypatch.setattr(server, "_call", call)
    assert not server.serves("4")
    server.accept("4")
    server.load_adapter("one", Path("/one"))
    assert server.serves("4")
    assert server.base == "base"
    del held[1:]
    assert not server.serves("4")
    held.clear()
    with pytest.raises(UnavailableError):
        server.serves("4")


def test_servers_are_of_one_kind() -> None:
    """One that does not answer at the start counts as one of the others' kind."""

    def servers(*kinds: bool | None) -> list[VllmServer]:
        made = [VllmServer(f"http://127.0.0.1:{i}") for i in range(len(kinds))]
        for server, kind in zip(made, kinds, strict=True):
            server.is_stock = lambda kind=kind: kind
        return made

    with pytest.raises(ValueError, match=r"127\.0\.0\.1:0 is a vLLM server without .*:2 has it"):
        all_stock(servers(True, None, False), adapters=True)
    assert all_stock(servers(True, None), adapters=True)
    assert not all_stock(servers(False, None), adapters=False)


@pytest.mark.parametrize(("short", "preset"), [("bf16", "bf16_master"), ("f16", "fp16_master")])
def test_a_head_in_another_dtype_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: str, preset: str
) -> None:
    """Log-probs of tokens of random logits, which the head rounds or does not."""
    scores = 3 * np.random.default_rng(1).standard_normal((32, 64)).astype(np.float32)
    params = lora.Adapted({}, tiny.params(config=SERVED), 1.0)
    f32, rounded = (parse(f"{preset},logits={name}") for name in ("f32", short))
    stock, checkpoint = StockServer("http://127.0.0.1:1"), Checkpoint(tmp_path)
    for head, other in ((f32, rounded), (rounded, f32)):
        logprobs = jax.nn.log_softmax(scores.astype(head.logits).astype(np.float32))
        drawn = np.asarray(logprobs)[:, 7].tolist()
        tops = [{"": drawn[i], "top": float(row.max())} for i, row in enumerate(logprobs)]
        one = {"logprobs": {"token_logprobs": drawn, "top_logprobs": tops}}
        reply = lambda *given, one=one: {"choices": [one] * given[2]["n"]}  # noqa: E731
        monkeypatch.setattr(stock, "_call", reply)
        check_head(stock, WeightRoute(decoder(SERVED), params, 0, head, checkpoint))
        remedies = (
            f'computes in {head.logits.name} .*{{"head_dtype": "{other.logits.name}"}}.*'
            f"train with logits={short_name(head.logits)} in"
        )
        with pytest.raises(RefusedError, match=remedies):
            check_head(stock, WeightRoute(decoder(SERVED), params, 0, other, checkpoint))
    assert rounds_logits([0.0] * 500 + [0.3] * 15, dtype=f32.sampler) is None


class InProcess:
    """Answers as a client of a server does that computes in the sampler's dtype of `precision`."""

    def __init__(self, params, precision: Precision) -> None:
        self._sampler = EmbeddedSampler(MODEL, params, precision=precision)
        self.close = lambda: None

    def use_version(self, version: int, *, urls: list[str], adapter: str) -> None:
        assert (version, adapter) == (0, "base")

    def sample(self, prompts, params: SamplingParams, *, group_size: int):
        for one in self._sampler.sample(prompts, params, group_size=group_size):
            yield one if params.top_k == 0 else one._replace(logprobs=0 * one.logprobs)


def test_a_server_in_another_dtype_of_16_bits_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its divergence is within the bound of the learner's dtype, and an f32 head shows none."""
    monkeypatch.setattr(StockServer, "models", lambda *_, **__: [{"id": "base", "parent": None}])
    monkeypatch.setattr(StockServer, "logprob_gaps", lambda *_, **__: [])
    directory, layout = tmp_path / "model", make_layout(config(tmp_path).mesh)
    tiny.write_checkpoint(directory, config=SERVED)
    params = lora.Adapted({}, cast(tiny.params(config=SERVED), parse("bf16").wire), 1.0)
    precisions = [parse("bf16_master"), parse("fp16_master,wire=bf16")]
    answering = [InProcess(params.frozen, precision) for precision in precisions]
    for i, precision in enumerate(precisions):
        route = WeightRoute(MODEL, params, 0, precision, Checkpoint(directory))
        stock, clients = StockServer("http://127.0.0.1:1"), iter((answering[i], answering[1 - i]))
        check = make_base_check(route, layout=layout, client=lambda _, found=clients: next(found))
        check([stock], params.frozen, 0)
        there, own = (precisions[j].sampler.name for j in (1 - i, i))
        with pytest.raises(RefusedError, match=f"computes in {there}.* learner expects {own}"):
            check([stock], params.frozen, 0)
