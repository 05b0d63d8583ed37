"""A server that is killed at random under load: nothing acknowledged is lost or applied twice."""

import http.client
import json
import random
import select
import time
import urllib.parse
from contextlib import closing

import pytest
import torch
from tinker import types

from tests import tiny
from tests.service.serving import KEYS, QUIET, Server
from tests.service.test_client import ADAM, supervised

pytestmark = pytest.mark.filterwarnings(*QUIET)

DATA = [supervised(list(range(5, 25)))]
STEPS = 12
HEADERS = {"X-API-Key": KEYS[0], "Content-Type": "application/json"}
ADVANCED = 1_000  # a sequence number whose turn does not come


def likelihood(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The cross entropy of weights 1."""
    return -logprobs.sum(), {}


def losses_of(server: Server, *, kill: bool) -> list[float]:
    """The losses of a short run; with `kill` the server dies in a step of it and comes back."""
    with server.client() as service:
        client = service.create_lora_training_client("tiny", rank=4, seed=3).result()
        uploaded = service.create_custom_loss(likelihood, {"logprobs": 1}).result()
        futures = []
        for step in range(STEPS):
            if step % 2:
                futures.append(client.forward_backward_custom(DATA, uploaded))
            else:
                futures.append(client.forward_backward(DATA, "cross_entropy"))
            client.optim_step(ADAM)
            if kill and step == STEPS // 2:
                time.sleep(random.uniform(0, 0.1))
                server.kill()
                server.start()
            futures[-1].result()
        sampler = client.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints([5, 6])
        params = types.SamplingParams(max_tokens=3, seed=1, stop=[])
        first = sampler.sample(prompt, num_samples=1, sampling_params=params).result()
        if kill:
            server.kill()
            server.start()
            # A sampling client keeps its weights, and the model what it had learned.
            again = sampler.sample(prompt, num_samples=1, sampling_params=params).result()
            assert again.sequences[0].tokens == first.sequences[0].tokens
            client.forward(DATA, "cross_entropy").result()
        return [future.result().metrics["loss:sum"] for future in futures]


def test_kills_change_nothing(tmp_path):
    model = tiny.write_checkpoint(tmp_path / "model")
    options = ("--precision", "fp32", "--snapshot_seconds", "1")
    server = Server(model, tmp_path / "run", *options)
    try:
        expected = losses_of(server, kill=False)
        found = losses_of(server, kill=True)
    finally:
        server.stop()
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_server_that_is_stopped_tells_whoever_waits_to_ask_again(tmp_path):
    server = Server(tiny.write_checkpoint(tmp_path / "model"), tmp_path / "run")
    try:
        step = {
            "model_id": new_model(server),
            "seq_id": ADVANCED,
            "adam_params": {"learning_rate": 0.0},
        }
        # One connection: what a new one sends, the server may not have read before it stops.
        address = urllib.parse.urlsplit(server.url).netloc
        with closing(http.client.HTTPConnection(address, timeout=250)) as connection:
            name = json.load(post(connection, "optim_step", step).getresponse())["request_id"]
            waiting = post(connection, "retrieve_future", {"request_id": name})
            assert not select.select([waiting.sock], [], [], 0.5)[0]
            server.stop()
            assert json.load(waiting.getresponse())["type"] == "try_again"
        assert "Traceback" not in server.log()
    finally:
        server.stop()


def new_model(server: Server) -> str:
    """Makes a model; returns its id."""
    with server.client() as service:
        return service.create_lora_training_client("tiny", rank=4).result().model_id


def post(
    connection: http.client.HTTPConnection, path: str, content: dict[str, object]
) -> http.client.HTTPConnection:
    """Sends a request as the client does; it is sent when this returns."""
    connection.request("POST", f"/api/v1/{path}", json.dumps(content), HEADERS)
    return connection
