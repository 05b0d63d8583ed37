"""Requests that are refused: with the reason, and without a wait for those after them."""

import time
from collections.abc import Iterator
from typing import Any

import anyio
import jax
import pytest
import zstandard
from starlette.testclient import TestClient
from tinker import types

from jaxrl.core import Precision, cast
from jaxrl.service import app as app_module, engine as engine_module, routing as routing_module
from jaxrl.service.app import application
from jaxrl.service.devices import Devices
from jaxrl.service.engine import Engine
from jaxrl.service.files import Files
from jaxrl.service.listing import listing_routes
from jaxrl.service.pool import Base, Kind
from jaxrl.service.requests import Limits, decode
from jaxrl.service.routing import Service
from jaxrl.service.state import Store
from jaxrl.sharding import PRESETS, Layout, make_mesh
from tests import tiny
from tests.service.serving import QUIET

pytestmark = pytest.mark.filterwarnings(*QUIET)


class Kept:
    """A sampler that nobody samples from."""

    remote = False

    def keep(self, name: str, weights: Any) -> None:
        pass


class Client:
    """Requests of one training client, numbered as the official one does."""

    def __init__(self, http: TestClient) -> None:
        self.http, self.next = http, 1
        session = self.post(
            "create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"}
        ).json()["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        lora = {"rank": 4}
        self.model = self.result(self.post("create_model", asked | {"lora_config": lora}))[
            "model_id"
        ]

    def post(self, path: str, content: Any) -> Any:
        return self.http.post(f"/api/v1/{path}", json=content)

    def numbered(self, route: str, **content: Any) -> Any:
        content |= {"model_id": self.model, "seq_id": self.next}
        self.next += 1
        return self.post(route, content)

    def result(self, accepted: Any) -> Any:
        assert accepted.status_code == 200, accepted.text
        asked = {"request_id": accepted.json()["request_id"]}
        late = time.monotonic() + 250
        while (found := self.post("retrieve_future", asked).json()).get("type") == "try_again":
            assert time.monotonic() < late
        return found

    def step(self) -> dict[str, float]:
        adam = types.AdamParams(learning_rate=1e-2).model_dump()
        return self.result(self.numbered("optim_step", adam_params=adam))["metrics"]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    directory, precision = tmp_path_factory.mktemp("refused"), Precision.of("fp32")
    one = Layout(make_mesh(devices=jax.devices()[:1]), PRESETS["all"])
    store = Store(directory / "state.sqlite")
    base = Base(tiny.model(), cast(tiny.params(), precision.wire), precision, one)
    files = Files(directory, base_name="tiny")
    engine = Engine(
        Devices(base, files=files, samplers=lambda load: Kept(), microbatch_tokens=1024),
        store=store,
        files=files,
        max_batch=8,
        slots=4,
        snapshot_seconds=1000,
    )
    service = Service(engine, "tiny", directory, {"tml-key": "owner"}, 0)
    app = application(service, listing_routes(service))
    http = TestClient(app, headers={"x-api-key": "tml-key"}, raise_server_exceptions=False)
    with http:
        yield Client(http)
    engine.close()
    store.close()


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        ("save_weights_external", {"path": "e", "age_encryption_recipients": ["a"]}, "encrypted"),
        ("load_weights", {"path": 3}, "path"),
        ("load_weights", {"path": "tinker://a/weights/b", "other": 1}, "other"),
        ("optim_step", {"adam_params": []}, "adam_params"),
        ("optim_step", {"adam_params": {"learning_rate": "a"}}, "learning_rate"),
        ("save_weights", {"path": "../x"}, "must not begin with a dot"),
        ("save_weights", {"path": "x", "ttl_seconds": 10**15}, "an hour to ten years"),
        ("save_weights_for_sampler", {"path": []}, "path"),
    ],
)
def test_a_refused_request_holds_up_none_after_it(
    client: Client, path: str, content: dict[str, Any], message: str
) -> None:
    refused = client.numbered(path, **content)
    assert (refused.status_code, message in refused.text) == (400, True), refused.text
    assert client.step()["grad_norm"] == 0


def test_a_body_of_another_form_is_refused(client: Client) -> None:
    def put_ttl(path: str, content: Any) -> Any:
        assert client.result(client.numbered("save_weights", path="ttl"))["path"]
        return client.http.put(f"/api/v1/{path}", json=content)

    at = f"training_runs/{client.model}/checkpoints/weights/ttl/ttl"
    for send, path, content, message in (
        (client.post, "optim_step", [], "no object of JSON"),
        (client.post, "load_weights", "text", "no object of JSON"),
        (client.post, "asample", [1], "no object of JSON"),
        (client.post, "cancel_future", 7, "no object of JSON"),
        (client.post, "optim_step", {"model_id": [1], "seq_id": 9}, "is no id"),
        (client.post, "optim_step", {"model_id": client.model, "seq_id": 2**70}, "too large"),
        (client.post, "weights_info", {"tinker_path": 5}, "tinker_path = 5: it must be the path"),
        (put_ttl, at, {"ttl_seconds": "a"}, "an hour to ten years"),
    ):
        refused = send(path, content)
        assert (refused.status_code, message in refused.text) == (400, True), refused.text
    assert client.step()["grad_norm"] == 0


def test_a_rank_that_would_take_all_memory_is_refused(client: Client) -> None:
    """It ended the server on a CPU, and each one after it that went on with its requests."""
    asked = {"session_id": client.model.split(":train:")[0], "model_seq_id": 8}
    asked |= {"base_model": "tiny", "lora_config": {"rank": 10**9}}
    refused = client.post("create_model", asked)
    assert (refused.status_code, "must be 1 to 1024" in refused.text) == (400, True), refused.text


def test_adapters_have_the_parts_that_are_asked_for(client: Client, monkeypatch: Any) -> None:
    """Without one of the output layer before servers, and after a server that knew none."""
    path = client.result(client.numbered("save_weights", path="parts"))["path"]
    found = client.post("weights_info", {"tinker_path": path}).json()
    assert (found["train_attn"], found["train_mlp"], found["train_unembed"]) == (True,) * 3
    assert Kind.of({"rank": 4, "attention": True, "mlp": True}) == Kind(4, unembed=False)
    none = dict.fromkeys(("train_attn", "train_mlp", "train_unembed"), False)
    asked = {"session_id": client.model.split(":train:")[0], "model_seq_id": 9}
    asked |= {"base_model": "tiny", "lora_config": {"rank": 4, **none}}
    refused = client.post("create_model", asked)
    assert (refused.status_code, "nothing is trained" in refused.text) == (400, True)
    monkeypatch.setattr(Kept, "remote", True)
    config = {"rank": 4} | none | {"train_unembed": True}
    refused = client.post("create_model", asked | {"lora_config": config})
    assert (refused.status_code, "adapters of the layers alone" in refused.text) == (400, True)
    state = {"session_id": asked["session_id"], "model_seq_id": 9, "path": path, "optimizer": True}
    refused = client.post("load_weights", state)
    assert (refused.status_code, "parts adapts the output" in refused.text) == (400, True)
    model = client.result(client.post("create_model", asked | {"lora_config": {"rank": 4}}))
    asked = {"model_id": model["model_id"], "seq_id": 1, "path": "served"}
    path = client.result(client.post("save_weights", asked))["path"]
    assert not client.post("weights_info", {"tinker_path": path}).json()["train_unembed"]


def test_a_name_is_not_given_twice(client: Client) -> None:
    """Nor is it that of a checkpoint which the server names."""
    for path, message in (("save_weights", "overwrite=True"), ("save_weights_for_sampler", "name")):
        first = client.result(client.numbered(path, path="twice"))
        assert first["path"].endswith("/twice")
        again = client.result(client.numbered(path, path="twice"))
        assert f"{first['path']} exists" in again["error"]
        assert message in again["error"]
        assert again["category"] == "user"
    route = "save_weights_for_sampler"
    names = [f"at-{client.next:06d}", "inflight"]
    for number, kind in enumerate(("snapshot", "inflight", "inflight")):
        given = {"kind": kind, "sampling_session_seq_id": number}
        assert "error" not in client.result(client.numbered(route, **given))
    for name in names:
        assert "error" not in client.result(client.numbered(route, path=name))


@pytest.mark.parametrize(
    ("stop", "message"),
    [("", "must not be empty"), (["a", ""], "must not be empty"), ([5, 10**6], "0 to 63")],
)
def test_a_stop_that_cannot_be_is_refused(stop: Any, message: str) -> None:
    params = types.SamplingParams(stop=stop)
    asked = types.SampleRequest(prompt=types.ModelInput.from_ints([5]), sampling_params=params)
    with pytest.raises(ValueError, match=message):
        decode("sample", asked.model_dump_json().encode(), Limits(64, 128, pytest.fail))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"temperature": -1.0}, "temperature = -1.0: it must be a finite"),
        ({"top_p": 0.0}, "top_p = 0.0: it must be above 0"),
        ({"top_k": -2}, "top_k = -2: it must be at least 1"),
    ],
)
def test_a_setting_out_of_its_range_is_named(changed: dict[str, Any], message: str) -> None:
    params = types.SamplingParams(**changed)
    asked = types.SampleRequest(prompt=types.ModelInput.from_ints([5]), sampling_params=params)
    with pytest.raises(ValueError, match=message):
        decode("sample", asked.model_dump_json().encode(), Limits(64, 128, pytest.fail))


def test_an_image_in_a_prompt_is_refused_by_its_place() -> None:
    chunks = [types.EncodedTextChunk(tokens=[5]), types.ImageChunk(data=b"a", format="png")]
    prompt = types.ModelInput(chunks=chunks)
    asked = types.SampleRequest(prompt=prompt, sampling_params=types.SamplingParams())
    with pytest.raises(ValueError, match="prompt: chunk 1 is image; only tokens"):
        decode("sample", asked.model_dump_json().encode(), Limits(64, 128, pytest.fail))


def test_a_body_that_expands_without_end_is_refused(client: Client, monkeypatch: Any) -> None:
    monkeypatch.setattr(app_module, "_MOST_BYTES", 1000)
    zstd = {"content-encoding": "zstd"}
    for route, body, headers, message in (
        ("forward_backward", zstandard.compress(bytes(1001)), zstd, "more than 1000 bytes"),
        ("forward_backward", zstandard.compress(b"\xff" * 1000), zstd, "no ForwardBackwardRequest"),
        ("forward_backward", b"junk", zstd, "no zstd"),
        ("forward_backward", bytes(1001), {}, "more than 1000 bytes"),
        ("asample", b" " * 1001, {}, "more than 1000 bytes"),
    ):
        refused = client.http.post(f"/api/v1/{route}", content=body, headers=headers)
        assert (refused.status_code, message in refused.text) == (400, True), refused.text


def test_json_that_would_take_all_memory_is_refused(client: Client, monkeypatch: Any) -> None:
    monkeypatch.setattr(routing_module, "_MOST_JSON", 1000)
    refused = client.http.post("/api/v1/asample", content=b"[" + b"[]," * 400 + b"0]")
    assert (refused.status_code, "1203 bytes; JSON may have 1000" in refused.text) == (400, True)


def test_a_client_that_leaves_within_its_body_is_no_error(client: Client) -> None:
    sent = list[Any]()

    async def leave() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"x-api-key", b"tml-key")]
    scope = {"type": "http", "method": "POST", "path": "/api/v1/asample", "headers": headers}
    anyio.run(client.http.app, scope | {"query_string": b""}, leave, send)
    assert sent[0]["status"] == 400


def test_samples_without_end_are_refused() -> None:
    params = types.SamplingParams(max_tokens=1)
    prompt = types.ModelInput.from_ints([5])
    asked = types.SampleRequest(prompt=prompt, sampling_params=params, num_samples=10**6)
    with pytest.raises(ValueError, match="num_samples = 1000000: it must be 1 to 4096"):
        decode("sample", asked.model_dump_json().encode(), Limits(64, 128, pytest.fail))


def test_a_deleted_checkpoint_answers_nobody(client: Client) -> None:
    """Its sampling clients are refused, whether or not the sampler has it loaded, and also once
    other weights have its name."""
    path = client.result(client.numbered("save_weights_for_sampler", path="gone"))["path"]
    session = client.model.split(":train:")[0]
    asked = {"session_id": session, "sampling_session_seq_id": 77, "model_path": path}
    made = client.post("create_sampling_session", asked).json()["sampling_session_id"]
    at = f"training_runs/{client.model}/checkpoints/sampler_weights/gone"
    assert client.http.delete(f"/api/v1/{at}").status_code == 204
    prompt = types.ModelInput.from_ints([5]).model_dump()
    for number in range(2):
        asked = {"sampling_session_id": made, "seq_id": number, "prompt": prompt}
        refused = client.post("asample", {**asked, "sampling_params": {}})
        assert refused.status_code == 400
        assert "there is no checkpoint" in refused.json()["error"]
        again = client.numbered("save_weights_for_sampler", path="gone")
        assert ("error" in client.result(again)) == (number == 1)
    assert client.http.get(f"/api/v1/samplers/{made}").json()["model_path"] == path


def test_old_answers_go_while_the_server_runs(client: Client, monkeypatch: Any) -> None:
    accepted = client.numbered("save_weights", path="old")
    client.result(accepted)
    monkeypatch.setattr(engine_module, "_KEPT_SECONDS", -1.0)
    monkeypatch.setattr(engine_module, "_TIDY_SECONDS", 0.0)
    late = time.monotonic() + 250
    while True:
        client.numbered("save_weights", path=f"at-{client.next}")
        asked = {"request_id": accepted.json()["request_id"]}
        if (found := client.post("retrieve_future", asked)).status_code == 410:
            break
        assert time.monotonic() < late
    assert "no longer kept" in found.text
