"""Times of a publish by part, of a copy of the same bytes, and of vLLM's reload of a checkpoint."""

import time
from collections.abc import Callable
from typing import Any

import httpx2
import numpy as np
from benchmarks import serving
from benchmarks.shapes import SHAPES

from jaxrl.bridge.in_vllm import auth
from jaxrl.bridge.servers.control import VllmServer
from jaxrl.bridge.servers.launch import LocalServer
from jaxrl.bridge.shared_memory import SharedMemoryPublisher
from jaxrl.bridge.source import ParamsSource
from jaxrl.core.casts import cast
from jaxrl.core.precision import DType
from jaxrl.models.decoder import decoder
from jaxrl.models.families import DecoderConfig
from jaxrl.models.rope import Rope

MODELS = {
    "S": SHAPES["S"],
    # The sizes of Qwen2.5-0.5B.
    "0.5B": DecoderConfig(
        model_type="qwen2",
        vocab_size=151936,
        hidden_size=896,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=4864,
        rms_norm_eps=1e-6,
        rope=Rope(theta=1e6),
        qkv_bias=True,
        qk_norm=None,
        tied=True,
        max_positions=1024,
    ),
}


def measure(
    name: str, *, params_dtype: DType, wire: DType, repetitions: int
) -> tuple[int, dict[str, list[float]]]:
    """Times the parts of a publish, `copy` and `vLLM reload`, alternately and after one warm-up.

    `copy` moves as many bytes within touched memory, in one thread; `vLLM reload` reads the
    checkpoint from the page cache.

    Returns:
      (bytes on the wire, seconds of each).
    """
    config = MODELS[name]
    specs = decoder(config).specs
    seconds: dict[str, list[float]] = {}
    with (
        serving.server(config, dtype=wire) as (started, weights, _),
        SharedMemoryPublisher(
            [VllmServer(started.url, api_key=started.api_key)], wire=wire, sampler=wire
        ) as publisher,
    ):
        source = ParamsSource(cast(weights, params_dtype), specs, dtype=wire)
        nbytes = sum(int(np.prod(s.shape)) for s in source.specs()) * wire.itemsize
        here, there = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        for version in range(repetitions + 1):
            parts = publisher.publish(source, version=version)._asdict()
            parts["copy"] = _seconds(lambda: np.copyto(there, here))
            parts["vLLM reload"] = _seconds(lambda: _reload(started))
            if version:
                for part, value in parts.items():
                    seconds.setdefault(part, []).append(value)
    return nbytes, seconds


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _reload(server: LocalServer) -> None:
    url, headers = f"{server.url}/collective_rpc", auth.headers(server.api_key)
    with httpx2.Client(headers=headers, timeout=300, trust_env=False) as client:
        client.post(url, json={"method": "reload_weights"}).raise_for_status()
