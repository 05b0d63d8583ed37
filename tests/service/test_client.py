"""The official client trains and samples on a real server."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from click.testing import CliRunner
from tinker import types
from tinker.cli.__main__ import main_cli

from tests import documented, tiny
from tests.service.serving import KEYS, QUIET, Server

pytestmark = pytest.mark.filterwarnings(*QUIET)

ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-8)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("service")
    made = Server(
        tiny.write_checkpoint(directory / "model"), directory / "run", "--precision", "fp32"
    )
    yield made
    made.stop()


def supervised(tokens: list[int]) -> types.Datum:
    """The next tokens of a text, each with weight 1."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )


def test_supervised_loop_lowers_the_loss(server: Server) -> None:
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=4).result()
        texts = [supervised(list(range(5, 25))), supervised([7, 9, 11, 13, 15])]
        losses = []
        for _ in range(8):
            found = client.forward_backward(texts, "cross_entropy")
            client.optim_step(ADAM).result()
            losses.append(found.result().metrics["loss:sum"])
        logprobs = client.forward(texts, "cross_entropy").result().loss_fn_outputs
    assert losses[-1] < 0.7 * losses[0]
    assert [one["logprobs"].shape for one in logprobs] == [[19], [4]]


def test_policy_loop_raises_the_reward(server: Server) -> None:
    wanted, rewards = set(range(2, 20)), []
    prompt = types.ModelInput.from_ints([30, 31, 32])
    params = types.SamplingParams(max_tokens=4, stop=[], seed=1)
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=4).result()
        while len(rewards) < 20 and (not rewards or rewards[-1] < rewards[0] + 0.25):
            sampler = client.save_weights_and_get_sampling_client().result()
            found = sampler.sample(prompt, num_samples=16, sampling_params=params).result()
            scores = [sum(t in wanted for t in one.tokens) / 4 for one in found.sequences]
            rewards.append(float(np.mean(scores)))
            data = [
                on_policy(prompt, one, score - rewards[-1])
                for one, score in zip(found.sequences, scores, strict=True)
            ]
            done = client.forward_backward(data, "importance_sampling")
            client.optim_step(types.AdamParams(learning_rate=5e-2, eps=1e-8)).result()
            # The first weights are those that sampled: learner and sampler agree.
            assert abs(done.result().metrics["mismatch/kl:mean"]) < 1e-5
        for one in data:  # the same by a recipe of jaxrl
            marks = np.array(one.loss_fn_inputs["logprobs"].data) != 0
            one.loss_fn_inputs["action_mask"] = types.TensorData.from_numpy(np.float32(marks))
        config = {"clip_high": 9.0, "jaxrl.shadow": 1.0}
        found = client.forward(data, "jaxrl.grpo", config).result()
        assert found.metrics["probe/beta_std:mean"] < 1e-5 < found.metrics["probe/alpha_std:mean"]
        for one in data:
            del one.loss_fn_inputs["action_mask"]
        expected = client.forward(data, "ppo", {"clip_high_threshold": 10.0}).result()
        assert found.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
    assert rewards[-1] >= rewards[0] + 0.25


def on_policy(
    prompt: types.ModelInput, sample: types.SampledSequence, advantage: float
) -> types.Datum:
    """A sample with its log-probs and advantage, as the cookbook's rl_loop makes it."""
    before = prompt.length - 1
    assert sample.logprobs is not None
    return types.Datum(
        model_input=prompt.append(types.EncodedTextChunk(tokens=sample.tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": [0] * before + sample.tokens,
            "logprobs": [0.0] * before + sample.logprobs,
            "advantages": [0.0] * before + [advantage] * len(sample.tokens),
        },
    )


def test_samples_are_scored_as_they_were_drawn(server: Server) -> None:
    with server.client() as service:
        sampler = service.create_sampling_client(base_model="tiny")
        prompt = types.ModelInput.from_ints([5, 6, 7])
        params = types.SamplingParams(max_tokens=6, seed=3, stop=[])
        first, again = (
            sampler.sample(prompt, num_samples=2, sampling_params=params).result() for _ in range(2)
        )
        assert [one.tokens for one in first.sequences] == [one.tokens for one in again.sequences]
        assert first.sequences[0].tokens != first.sequences[1].tokens
        for one in first.sequences:
            scored = sampler.compute_logprobs(
                prompt.append(types.EncodedTextChunk(tokens=one.tokens))
            ).result()
            assert scored[0] is None
            np.testing.assert_allclose(scored[3:], one.logprobs, atol=1e-5)
        stop = first.sequences[0].tokens[2]
        params = types.SamplingParams(max_tokens=6, seed=3, stop=[stop])
        ended = sampler.sample(prompt, num_samples=1, sampling_params=params).result()
        assert ended.sequences[0].tokens[-1] == stop
        assert ended.sequences[0].stop_reason == "stop"


def test_a_saved_state_goes_on_as_if_nothing_had_been(server: Server) -> None:
    data = [supervised(list(range(5, 25)))]
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=4, seed=5).result()
        client.forward_backward(data, "cross_entropy")
        client.optim_step(ADAM).result()
        path = client.save_state("one").result().path
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        found = []
        for one in (client, resumed):
            one.forward_backward(data, "cross_entropy")
            one.optim_step(ADAM)
            found.append(one.forward(data, "cross_entropy").result().metrics["loss:sum"])
        assert found[0] == found[1]


def test_a_bad_datum_is_named_before_anything_is_computed(server: Server) -> None:
    good, bad = supervised([5, 6, 7, 8]), supervised([5, 6, 7, 8])
    bad.loss_fn_inputs["target_tokens"] = types.TensorData.from_numpy(np.array([6, 7]))
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=4).result()
        with pytest.raises(tinker.BadRequestError, match=r"datum 1: target_tokens has shape \[2\]"):
            client.forward_backward([good, bad], "cross_entropy").result()
        assert client.optim_step(ADAM).result().metrics["grad_norm"] == 0
        for name, settings, message in (
            ("importance_samplin", None, "importance_sampling"),
            ("jaxrl.dapo", {"clip_hihg": 0.28}, "clip_high"),
            ("jaxrl.dap", None, "dapo"),
        ):
            with pytest.raises(tinker.BadRequestError, match=message):
                client.forward_backward([good], name, settings).result()


def test_a_state_that_is_refused_holds_up_no_request_after_it(server: Server) -> None:
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=4).result()
        saved = client.save_weights_for_sampler("for sampling").result().path
        other = service.create_lora_training_client("tiny", rank=2).result()
        for path, message in (
            ("tinker://none/weights/none", "no checkpoint"),
            (saved, "weights alone"),
            (other.save_state("other").result().path, "holds Kind"),
        ):
            with pytest.raises(tinker.BadRequestError, match=message):
                client.load_state(path).result()
        assert client.optim_step(ADAM).result(250).metrics["grad_norm"] == 0


def test_another_key_sees_nothing(server: Server) -> None:
    with server.client() as service, server.client("tml-second") as other:
        client = service.create_lora_training_client("tiny", rank=4).result()
        path = client.save_state("mine").result().path
        with pytest.raises(tinker.BadRequestError, match="no checkpoint"):
            other.create_training_client_from_state(path).result()
    with pytest.raises(tinker.AuthenticationError), server.client("tml-other") as stranger:
        stranger.create_lora_training_client("tiny", rank=4).result()


def test_the_documented_program_runs(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", KEYS[0])
    programs = [found for found in documented.snippets("py") if "tinker" in found.where]
    assert len(programs) == 3
    names: dict[str, Any] = {"url": server.url, "key": KEYS[0]}
    for program in programs:  # in one shell
        exec(compile(program.text, program.where, "exec"), names)
    service = names["service"]
    assert isinstance(service, tinker.ServiceClient)
    with service:
        assert names["model"] == "tiny"
        assert len(names["data"]) == 1


def test_a_loss_of_the_clients_own_is_differentiated_there(server: Server) -> None:
    data = [supervised(list(range(5, 25)))]
    with server.client() as service:
        norms = []
        for own in (False, True):
            client = service.create_lora_training_client("tiny", rank=4, seed=1).result()
            if own:
                found = client.forward_backward_custom(data, minus_sum)
            else:
                found = client.forward_backward(data, "cross_entropy")
            norms.append(client.optim_step(ADAM).result().metrics["grad_norm"])
            norms.append(found.result().metrics["loss:sum"])
    assert norms[:2] == pytest.approx(norms[2:], rel=1e-5)


def minus_sum(
    data: list[types.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """The cross entropy of weights 1."""
    return -torch.cat(logprobs).sum(), {}


def test_checkpoints_are_listed_published_and_deleted(server: Server) -> None:
    with server.client() as service, server.client("tml-second") as other:
        client = service.create_lora_training_client("tiny", rank=4).result()
        state = client.save_state("state").result().path
        weights = client.save_weights_for_sampler("weights", ttl_seconds=7200).result().path
        rest = service.create_rest_client()
        listed = rest.list_checkpoints(client.model_id).result().checkpoints
        assert [one.tinker_path for one in listed] == [state, weights]
        assert listed[0].expires_at is None
        assert listed[1].expires_at is not None
        run = rest.get_training_run(client.model_id).result()
        assert run.is_lora
        assert run.last_sampler_checkpoint is not None
        assert run.last_sampler_checkpoint.tinker_path == weights
        rest.publish_checkpoint_from_tinker_path(weights).result()
        params = types.SamplingParams(max_tokens=3, seed=1)
        prompt = types.ModelInput.from_ints([5, 6])
        mine, theirs = (one.create_sampling_client(model_path=weights) for one in (service, other))
        ask = dict[str, Any](num_samples=1, sampling_params=params)
        found = [one.sample(prompt, **ask).result().sequences[0].tokens for one in (mine, theirs)]
        assert found[0] == found[1]
        rest.unpublish_checkpoint_from_tinker_path(weights).result()
        assert mine.sample(prompt, **ask).result().sequences[0].tokens == found[0]
        with pytest.raises(tinker.BadRequestError, match="no checkpoint"):
            theirs.sample(prompt, **ask).result()
        rest.delete_checkpoint_from_tinker_path(weights).result()
        with pytest.raises(tinker.BadRequestError, match="no checkpoint"):
            other.create_sampling_client(model_path=weights).result()


def own_loss(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A clipped ratio with a penalty, divided by the number of tokens that are marked."""
    marked = advantages != 0
    log_ratio = torch.where(marked, logprobs - old, 0.0)
    ratio = log_ratio.exp()
    gained = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = (beta * log_ratio.square() - gained).sum() / marked.sum().clamp(min=1)
    return loss, {"custom/ratio:mean": ratio.max(), "custom/marked:sum": marked.float().sum()}


OWN_RANKS: dict[str, Any] = {"logprobs": 1, "old": 1, "advantages": 1, "beta": 0}


def own_datum(seed: int, count: int) -> types.Datum:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2, 60, count + 1).tolist()
    advantages = rng.normal(0, 1, count).astype(np.float32)
    advantages[: count // 2] = 0
    arrays = {
        "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:])),
        "old": types.TensorData.from_numpy(rng.normal(-4, 0.3, count).astype(np.float32)),
        "advantages": types.TensorData.from_numpy(advantages),
        "beta": types.TensorData.from_numpy(np.array(0.1 + seed, np.float32)),
    }
    model_input = types.ModelInput.from_ints(tokens[:-1])
    return types.Datum(model_input=model_input, loss_fn_inputs=arrays)


def test_an_uploaded_loss_is_as_in_the_client(server: Server) -> None:
    data = [own_datum(i, count) for i, count in enumerate((12, 7, 30))]

    def in_the_client(given: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
        names = list(OWN_RANKS)[1:]
        parts = [
            own_loss(own, *(one.loss_fn_inputs[name].to_torch() for name in names))
            for one, own in zip(given, logprobs, strict=True)
        ]
        metrics = {
            "custom/ratio:mean": float(np.mean([m["custom/ratio:mean"].item() for _, m in parts])),
            "custom/marked:sum": sum(m["custom/marked:sum"].item() for _, m in parts),
        }
        return torch.stack([loss for loss, _ in parts]).sum(), metrics

    with server.client() as service:
        uploaded = service.create_custom_loss(own_loss, OWN_RANKS).result()
        assert uploaded.loss_id is not None
        found = []
        for loss in (uploaded, in_the_client):
            client = service.create_lora_training_client("tiny", rank=4, seed=2).result()
            steps = []
            for _ in range(2):
                done = client.forward_backward_custom(data, loss)
                norm = client.optim_step(ADAM).result().metrics["grad_norm"]
                metrics = done.result().metrics
                steps.append([metrics[key] for key in ("loss:sum", *sorted(metrics)[:2])] + [norm])
            after = client.forward([supervised([5, 6, 7, 8])], "cross_entropy").result()
            found.append([*np.ravel(steps), *after.loss_fn_outputs[0]["logprobs"].data])
        assert found[0] == pytest.approx(found[1], rel=1e-5)
        other = own_datum(0, 9)
        other.loss_fn_inputs["old"] = types.TensorData.from_numpy(np.zeros(8, np.float32))
        with pytest.raises(tinker.BadRequestError, match=r"datum 0: old has shape \[8\]"):
            client.forward_backward_custom([other], uploaded).result()
    with server.client() as service:  # another session
        client = service.create_lora_training_client("tiny", rank=4).result()
        with pytest.raises(tinker.BadRequestError, match="is no loss of session"):
            client.forward_backward(data, "custom", {"loss_id": uploaded.loss_id}).result()
        for wrong, match in (
            (lambda logprobs: (torch.linalg.norm(logprobs), {}), "linalg_norm.*no counterp"),
            (lambda logprobs: (logprobs, {}), "without axes"),
        ):
            with pytest.raises(tinker.BadRequestError, match=match):
                service.create_custom_loss(wrong, {"logprobs": 1}).result()
        root = service.create_custom_loss(
            lambda logprobs: ((logprobs - logprobs).sqrt().sum(), {}), {"logprobs": 1}
        ).result()
        with pytest.raises(tinker.RequestFailedError, match=r"datum 0: the derivative.* not fin"):
            client.forward_backward_custom([supervised([5, 6, 7])], root).result()
        settings = {"loss_id": root.loss_id}
        alone = client.forward([supervised([5, 6, 7])], "custom", settings).result()
        assert alone.metrics["loss:sum"] == 0
        norm = client.optim_step(ADAM).result().metrics["grad_norm"]
    assert norm == 0


def test_the_page_shows_the_runs_of_a_key(server: Server) -> None:
    data, losses = [supervised([5, 6, 7, 8]), supervised([9, 10])], []
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=4).result()
        for _ in range(2):
            client.forward(data, "cross_entropy")  # adds nothing to a step
            parts = [client.forward_backward([one], "cross_entropy") for one in data]
            client.optim_step(ADAM).result()
            losses.append(sum(one.result().metrics["loss:sum"] for one in parts) / 4)

    def get(path: str, key: str) -> httpx.Response:
        return httpx.get(f"{server.url}{path}", auth=("anyone", key), timeout=250)

    found = get("/data", KEYS[0]).json()
    run = next(one for one in found["runs"] if one["name"] == client.model_id)
    assert run["series"]["loss"] == [[1, 2], pytest.approx(losses, rel=1e-4)]
    assert client.model_id in get("/", KEYS[0]).text
    assert get(f"/data?since={found['version']}", KEYS[0]).status_code == 204
    assert client.model_id not in get("/", KEYS[1]).text
    assert get("/", "tml-other").status_code == 401
    damaged = {"authorization": b"Basic \xe9"}
    assert httpx.get(server.url, headers=damaged, timeout=250).status_code == 401
    assert httpx.get(server.url, timeout=250).headers["www-authenticate"].startswith("Basic")


def test_a_checkpoint_is_downloaded_by_the_clients_program(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads the files from addresses that need no key, and nobody else makes one up."""
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", KEYS[0])
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=4).result()
        client.forward_backward([supervised([5, 6, 7])], "cross_entropy").result()
        client.optim_step(ADAM).result()
        state = client.save_state("state").result().path
        path = client.save_weights_external("weights").result().path
        found = tinker.RestClient().get_external_weights_urls(path).result()
    kept = {}
    for one in (state, path):
        asked = ["checkpoint", "download", one, "--output", str(tmp_path)]
        done = CliRunner().invoke(main_cli, asked)
        assert done.exit_code == 0, done.output
        directory = tmp_path / one.removeprefix("tinker://").replace("/", "_")
        kept[one] = {file.name: file.read_bytes() for file in directory.iterdir()}
    assert set(kept[path]) == {"adapter_config.json", "adapter_model.safetensors"}
    assert kept[state] == kept[path]
    name, url = max(found.urls.items())
    assert httpx.get(url, timeout=250).content == kept[path][name]
    changed = re.sub(r"expires=\d+", f"expires={2**40}", url)
    for other in (changed, url.replace(name, "state.npz"), url.split("?")[0], f"{url}0"):
        assert httpx.get(other, timeout=250).status_code == 403
