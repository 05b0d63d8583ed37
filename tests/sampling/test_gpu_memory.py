"""The memory of a GPU that a run shares with a server that it starts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxrl.builders.gpu_memory import check_room, jax_share
from jaxrl.builders.sampler import SamplerNeeds, open_sampler
from jaxrl.builders.weight_sync import WeightRoute
from jaxrl.config.sampler import SamplerConfig
from tests.sampling.serving import FP32, MODEL

PLATFORM = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}


@pytest.mark.parametrize(
    ("environment", "arguments", "fits"),
    [
        ({}, [], False),
        ({}, ["--gpu_memory_utilization=.3"], False),
        ({"XLA_CLIENT_MEM_FRACTION": ".5"}, [], False),
        ({"XLA_CLIENT_MEM_FRACTION": ".5"}, ["--gpu-memory-utilization", ".4"], True),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, [], True),
        (PLATFORM, [], True),
        ({}, ["--device-ids", "1"], True),
    ],
)
def test_shares_must_fit(environment, arguments, fits, monkeypatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = SamplerConfig(name="vllm", device="cuda", vllm_args=arguments)
    if fits:
        check_room(config)
        return
    said = f"jax has taken {jax_share():.0%} .*CUDA_VISIBLE_DEVICES=1.*XLA_CLIENT_MEM_FRACTION"
    with pytest.raises(ValueError, match=said):
        check_room(config)
    check_room(config.model_copy(update={"device": "cpu"}))


def test_a_run_says_so_before_it_starts_the_server(tmp_path: Path) -> None:
    gpus = np.array([SimpleNamespace(platform="gpu")])
    layout: Any = SimpleNamespace(mesh=SimpleNamespace(devices=gpus))
    checkpoint: Any = SimpleNamespace(unties=False)
    weights = WeightRoute(MODEL, {}, 0, FP32, checkpoint)
    with (
        pytest.raises(ValueError, match="vLLM asks for 92% of one and would not start"),
        open_sampler(
            SamplerConfig(name="vllm", device="cuda"),
            weights,
            layout=layout,
            needs=SamplerNeeds(32, 1),
            directory=tmp_path,
            note=print,
        ),
    ):
        pass
