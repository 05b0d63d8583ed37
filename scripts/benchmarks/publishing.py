"""Times of a publish by part, of a copy of the same bytes, and of vLLM's reload of a checkpoint."""

import dataclasses
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import httpx2
import jax
import numpy as np
from benchmarks import serving
from benchmarks.shapes import SHAPES
from benchmarks.timing import Run, alternate

from jaxrl.bridge import (
    LocalServer,
    ParamsSource,
    SharedMemoryPublisher,
    Timings,
    VllmServer,
    headers,
    payload,
)
from jaxrl.bridge.safetensors_file import plan_file
from jaxrl.core import DType, cast
from jaxrl.models import decoder, init

_HALF_BILLION = dataclasses.replace(  # the sizes of Qwen2.5-0.5B
    SHAPES["S"],
    model_type="qwen2",
    vocab_size=151936,
    hidden_size=896,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=4864,
    qkv_bias=True,
    qk_norm=None,
)
MODELS = {
    "tiny": dataclasses.replace(  # the quickstart's
        SHAPES["S"],
        vocab_size=102,
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        intermediate_size=192,
    ),
    **SHAPES,
    "0.5B": _HALF_BILLION,
    # vLLM's own reload leaves a tied head as it was; this one does the same work as the engine.
    "0.5B untied": dataclasses.replace(_HALF_BILLION, tied=False),
}


def measure(
    name: str, *, params_dtype: DType, wire: DType, repetitions: int
) -> tuple[int, dict[str, list[float]]]:
    """Times the parts of a publish, `copy` and `vLLM reload`, alternately and after one warm-up.

    `copy` moves the same number of bytes within touched memory, in two threads; `vLLM reload` reads
    the checkpoint from the page cache.

    Returns:
      (bytes on the wire, seconds of each).
    """
    config = MODELS[name]
    published: list[Timings] = []
    with (
        serving.server(config, dtype=wire) as (started, weights),
        SharedMemoryPublisher(
            [VllmServer(started.url, api_key=started.api_key)], wire=wire, sampler=wire
        ) as publisher,
        ThreadPoolExecutor(2) as pool,
    ):
        source = ParamsSource(cast(weights, params_dtype), decoder(config).specs, dtype=wire)
        nbytes = sum(int(np.prod(s.shape)) for s in source.specs()) * wire.itemsize
        here, there = np.ones((2, nbytes // 2), np.uint8), np.ones((2, nbytes // 2), np.uint8)
        runs: dict[str, Run] = {
            "publish": lambda i: published.append(publisher.publish(source, version=i)),
            "copy": lambda i: list(pool.map(np.copyto, there, here)),
            "vLLM reload": lambda i: _reload(started),
        }
        seconds = alternate(runs, repetitions=repetitions)
    del seconds["publish"]
    parts = {part: [getattr(one, part) for one in published[1:]] for part in Timings._fields}
    return nbytes, parts | seconds


def measure_write(
    name: str, *, params_dtype: DType, wire: DType, repetitions: int
) -> tuple[int, dict[str, list[float]]]:
    """Times the write of a payload and its parts, alternately and after one warm-up, without a
    server. `copy` is the same as in `measure`; `source` fetches the tensors.

    Returns:
      (bytes on the wire, seconds of each).
    """
    specs = decoder(MODELS[name]).specs
    params = init(specs, jax.random.key(0), dtype=params_dtype)
    source = ParamsSource(params, specs, dtype=wire)
    file = plan_file(list(source.specs()))
    here, *slots = (np.ones((2, -(-file.nbytes // 2)), np.uint8) for _ in range(3))

    def write(i: int) -> None:
        payload.write_tensors(source, file, slots[i % 2].reshape(-1))

    with ThreadPoolExecutor(2) as pool:
        runs: dict[str, Run] = {
            "copy": lambda i: list(pool.map(np.copyto, slots[i % 2], here)),
            "source": lambda i: deque(source, maxlen=0),
            "write": write,
        }
        return file.nbytes, alternate(runs, repetitions=repetitions)


def _reload(server: LocalServer) -> None:
    url, own = f"{server.url}/collective_rpc", headers(server.api_key)
    with httpx2.Client(headers=own, timeout=300, trust_env=False) as client:
        client.post(url, json={"method": "reload_weights"}).raise_for_status()
