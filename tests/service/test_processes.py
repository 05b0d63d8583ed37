"""A service of two processes computes what one process with the same mesh computes."""

import signal
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests import tiny
from tests.service.serving import QUIET, Server
from tests.service.test_client import ADAM, supervised

pytestmark = pytest.mark.filterwarnings(*QUIET)

DATA = [supervised(list(range(5, 25))), supervised([7, 9, 11, 13, 15])]
PROMPT = types.ModelInput.from_ints([5, 6, 7])
PARAMS = types.SamplingParams(max_tokens=4, seed=1, stop=[])
MESH = ("--precision", "fp32", "--mesh.data", "2", "--mesh.fsdp", "2")
RANKS = (4, 0)  # adapters, and all parameters


def trained(server: Server) -> tuple[list[Any], list[str]]:
    """Numbers of two short runs, and the paths of their states."""
    numbers, paths = list[Any](), list[str]()
    with server.client() as service:
        for rank in RANKS:
            client = service.create_lora_training_client("tiny", rank=rank, seed=3).result()
            for _ in range(2):
                found = client.forward_backward(DATA, "cross_entropy").result()
                numbers += [found.metrics["loss:sum"], logprobs_of(found)]
                numbers.append(client.optim_step(ADAM).result().metrics["grad_norm"])
            sampler = client.save_weights_and_get_sampling_client().result()
            sampled = sampler.sample(
                PROMPT,
                num_samples=3,
                sampling_params=PARAMS,
                include_prompt_logprobs=True,
                topk_prompt_logprobs=2,
            ).result()
            numbers += [one.tokens for one in sampled.sequences]
            numbers += [one.logprobs for one in sampled.sequences]
            numbers += [sampled.prompt_logprobs[1:], sampled.topk_prompt_logprobs_np.logprobs[1:]]
            paths.append(client.save_state("kept").result().path)
            client.save_state("damaged").result()
    for file in server.directory.rglob("*damaged/state.npz"):
        file.unlink()
    return numbers, paths


def loaded(server: Server, paths: list[str]) -> list[Any]:
    """Numbers of new clients from these states, after a step more. Between gradients and step a
    request fails in every process, which loses no other."""
    numbers = list[Any]()
    with server.client() as service:
        for path in paths:
            client = service.create_training_client_from_state_with_optimizer(path).result()
            client.forward_backward(DATA, "cross_entropy").result()
            damaged = path.replace("kept", "damaged")
            with pytest.raises(tinker.RequestFailedError, match=r"state\.npz"):
                service.create_training_client_from_state(damaged).result()
            client.optim_step(ADAM).result()
            numbers.append(logprobs_of(client.forward(DATA, "cross_entropy").result()))
    return numbers


def logprobs_of(found: types.ForwardBackwardOutput) -> np.ndarray:
    return np.concatenate([one["logprobs"].to_numpy() for one in found.loss_fn_outputs])


def test_two_processes_compute_what_one_computes(tmp_path) -> None:
    model = tiny.write_checkpoint(tmp_path / "model")
    one = Server(model, tmp_path / "one", *MESH, devices=4)
    try:
        expected, paths = trained(one)
        expected += loaded(one, paths)
    finally:
        one.stop()
    two = Server(model, tmp_path / "two", *MESH, devices=4, processes=2)
    try:
        found, paths = trained(two)
        two.others[0].send_signal(signal.SIGTERM)  # ends both
        assert [process.wait() for process in (two.process, *two.others)] == [0, 0]
        two.start()
        found += loaded(two, paths)
        two.process.kill()
        assert two.others[0].wait() != 0
    finally:
        two.stop()
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
